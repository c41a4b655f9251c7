"""Requests that outlive the process of their engine, which is a fake that counts up from the prompt's last
id."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import headway_testing
import pytest
from headway_testing import fake_process
from headway_testing.event_stream import EventStream, submit
from headway_testing.waiting import until

from headway.engine import EngineConfig, EngineDeadError, QueueFullError, SamplingParams, Submit
from headway.server.engine.client import BackOff, EngineClient
from headway.server.engine.process import Patience

SUPPORT = Path(headway_testing.__file__).parents[1]
CONFIG = EngineConfig(model_path="/nowhere", max_running=5, max_waiting=4)
QUICK = BackOff(first_seconds=0.05, longest_seconds=0.2)
BRIEF = Patience(load_seconds=60, serve_seconds=2, shutdown_seconds=0.3)
LAST_ID = 100


@pytest.fixture(autouse=True)
def support_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))


@asynccontextmanager
async def started(
    mode: str = "serve", *, replay: int = 2, back_off: BackOff = QUICK
) -> AsyncIterator[EngineClient]:
    command = [sys.executable, "-P", "-m", "headway_testing.fake_process", mode]
    client = EngineClient(CONFIG, command=command, patience=BRIEF, back_off=back_off, replay=replay)
    client.start()
    try:
        await client.wait_until_ready()
        yield client
    finally:
        await client.close()


def ask(client: EngineClient, max_tokens: int) -> EventStream:
    request = Submit(
        request_id=client.new_request_id(),
        prompt_token_ids=[1, 2, LAST_ID],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
    )
    return submit(client, [request])


async def collect(stream: EventStream) -> list[int]:
    tokens: list[int] = []
    while True:
        for event in await asyncio.wait_for(stream.take(), 60):
            tokens += event.token_ids
            if event.finish_reason is not None:
                return tokens


def expected(num_tokens: int) -> list[int]:
    return list(range(LAST_ID + 1, LAST_ID + 1 + num_tokens))


def kill(client: EngineClient, number: signal.Signals = signal.SIGKILL) -> None:
    assert client._process is not None
    os.kill(client._process._child.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on_where_the_engine_ended(number: signal.Signals) -> None:
    async with started() as client:
        streams = [ask(client, 300) for _ in range(3)]
        await until(lambda: client.stats.num_generation_tokens > 30)
        kill(client, number)
        await until(lambda: client.status().state == "restarting")
        streams.append(ask(client, 20))  # a new one waits for the next life, too
        assert [await collect(s) for s in streams] == [expected(300)] * 3 + [expected(20)]
        assert (client.num_replays, client.status().num_restarts) == (3, 1)
        assert client.stats.finished_by_reason.get("error", 0) == 0


async def test_what_ends_each_engine_is_given_up_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as client:
        streams = [ask(client, 200) for _ in range(2)]
        await until(lambda: client.stats.num_generation_tokens > 0)
        deadly = ask(client, fake_process.DEADLY_MAX_TOKENS)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(deadly)
        assert [await collect(s) for s in streams] == [expected(200)] * 2
        assert client.status().num_restarts <= 4  # the last two perhaps beside requests that had passed
        assert client.stats.finished_by_reason["error"] == 1
    assert any("request 2 ended the engine" in message for message in caplog.messages)


async def test_an_engine_that_does_not_come_back_fails_what_waits(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    async with started(f"needs:{folder}") as client:
        stream = ask(client, 100_000)
        await stream.take()
        folder.rmdir()
        kill(client)
        with pytest.raises(EngineDeadError, match=rf"3 times in a row.*{folder} is missing"):
            await collect(stream)
        with pytest.raises(EngineDeadError, match="times in a row"):
            ask(client, 5)


async def test_an_engine_that_loads_for_too_long_fails_what_waits() -> None:
    slow = BackOff(first_seconds=30)
    async with started(back_off=slow) as client:
        client._patience = replace(BRIEF, load_seconds=0.5)
        stream = ask(client, 100_000)
        await stream.take()
        kill(client)
        with pytest.raises(EngineDeadError, match="is being restarted"):
            await collect(stream)


async def test_no_more_requests_wait_than_may() -> None:
    async with started(back_off=BackOff(first_seconds=30)) as client:
        kill(client)
        await until(lambda: client.status().state == "restarting")
        streams = [ask(client, 5) for _ in range(CONFIG.max_waiting)]
        with pytest.raises(QueueFullError, match="4 requests wait"):
            ask(client, 5)
        assert len(streams) == 4


async def test_requests_of_a_server_that_drains_go_on_too() -> None:
    async with started() as client:
        stream = ask(client, 300)
        await until(lambda: client.stats.num_generation_tokens > 30)
        client.drain(20)
        kill(client)
        assert await collect(stream) == expected(300)


async def test_an_aborted_request_is_not_sent_again() -> None:
    async with started() as client:
        left = ask(client, 100_000)
        await left.take()
        kill(client)
        await until(lambda: client.status().state == "restarting")
        client.abort([0])
        assert await collect(ask(client, 30)) == expected(30)
        assert client.num_replays == 0


async def test_lives_that_served_do_not_lengthen_the_pause(caplog: pytest.LogCaptureFixture) -> None:
    async with started(replay=10) as client:
        for number in range(3):
            await collect(ask(client, 5))
            kill(client)
            await until(lambda number=number: client.status().num_restarts == number + 1)  # type: ignore[misc]
            await until(lambda: client.status().state == "serving")
    assert sum("restart in 0.05 s" in message for message in caplog.messages) == 3
