"""The engine's process from the outside: frames, deaths, restarts, farewells. The process is a fake."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import headway_testing
import pytest
import zmq
from headway_testing import fake_process
from headway_testing.event_stream import EventStream, submit
from headway_testing.waiting import until

from headway.engine import (
    EngineConfig,
    EngineDeadError,
    FinishReason,
    FromEngine,
    ModelError,
    SamplingParams,
    Submit,
    TokenTable,
)
from headway.server.engine.child import EngineChild
from headway.server.engine.client import BackOff, EngineClient
from headway.server.engine.process import FRAMES_AT_ONCE, Patience

SUPPORT = Path(headway_testing.__file__).parents[1]
CONFIG = EngineConfig(model_path="/nowhere", depth=2, max_running=5)
TABLE = TokenTable(tokens=[b"a", b"<end>"], special_ids=[1], end_ids=[1])
QUICK = BackOff(first_seconds=0.05, longest_seconds=0.2)
BRIEF = Patience(load_seconds=60, serve_seconds=60, shutdown_seconds=0.3)


@pytest.fixture(autouse=True)
def support_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


@asynccontextmanager
async def started(mode: str = "serve", patience: Patience = BRIEF) -> AsyncIterator[EngineClient]:
    command = [sys.executable, "-P", "-m", "headway_testing.fake_process", mode]
    client = EngineClient(CONFIG, command=command, patience=patience, back_off=QUICK, token_table=TABLE)
    client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with started() as client:
        await client.wait_until_ready()
        yield client


def request(client: EngineClient, max_tokens: int = 10, last_id: int = 100) -> Submit:
    return Submit(
        request_id=client.new_request_id(),
        prompt_token_ids=[1, 2, last_id],
        sampling=SamplingParams(),
        max_tokens=max_tokens,
    )


async def collect(stream: EventStream, num_requests: int = 1) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    num_open = num_requests
    while num_open:
        for event in await stream.take():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            num_open -= event.finish_reason is FinishReason.LENGTH
    return tokens


def pid_of(client: EngineClient) -> int:
    assert client._process is not None
    assert client._process._process is not None
    return client._process._process.pid


async def within(seconds: float, awaitable: Awaitable[object]) -> object:
    return await asyncio.wait_for(awaitable, seconds)


async def in_time(awaitable: Awaitable[object]) -> object:
    """Only a fault reaches the limit."""
    return await within(30, awaitable)


async def test_requests_of_a_group_get_their_tokens_and_the_config_arrives(client: EngineClient) -> None:
    assert client.info is not None
    assert (client.info.depth, client.info.max_running) == (2, 5)
    requests = [request(client, max_tokens=10, last_id=i) for i in (100, 200)]
    tokens = await collect(submit(client, requests), 2)
    assert tokens == {0: list(range(101, 111)), 1: list(range(201, 211))}


async def test_each_life_of_the_engine_gets_the_token_table(client: EngineClient) -> None:
    assert client.info is not None
    assert client.info.architecture == "Fake2ForCausalLM"
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().state == "restarting")
    client.info = None
    await until(lambda: client.info is not None)
    assert client.info.architecture == "Fake2ForCausalLM"


async def test_stats_and_heartbeats_arrive(client: EngineClient) -> None:
    await collect(submit(client, [request(client)]))
    await until(lambda: client.stats.num_generation_tokens == 10)
    status = client.status()
    assert (status.state, status.phase, status.is_alive, status.num_restarts) == ("serving", "serve", True, 0)
    assert status.step > 0
    assert status.heartbeat_age_seconds is not None
    assert status.heartbeat_age_seconds < 10


async def test_an_aborted_request_gets_no_more_events(client: EngineClient) -> None:
    stream = submit(client, [request(client, max_tokens=100_000)])
    await stream.take()
    client.abort([0])
    assert stream._events == deque()
    await asyncio.sleep(0.2)
    with pytest.raises(TimeoutError):
        await within(0.1, stream.take())
    generated = client.stats.num_generation_tokens
    await asyncio.sleep(0.1)
    assert client.stats.num_generation_tokens == generated


async def test_a_killed_engine_fails_all_streams_at_once_and_comes_back(client: EngineClient) -> None:
    streams = [submit(client, [request(client, max_tokens=100_000)]) for _ in range(8)]
    await asyncio.gather(*(stream.take() for stream in streams))
    os.kill(pid_of(client), signal.SIGKILL)
    results = await in_time(asyncio.gather(*(collect(s) for s in streams), return_exceptions=True))
    assert isinstance(results, list)
    assert all(isinstance(error, EngineDeadError) for error in results), results
    assert "SIGKILL" in str(results[0])
    assert client.status().state == "restarting"
    with pytest.raises(EngineDeadError, match="restarted"):
        submit(client, [request(client)])
    await until(lambda: client.status().state == "serving")
    assert client.status().num_restarts == 1
    assert len((await collect(submit(client, [request(client)]))).popitem()[1]) == 10


async def test_counters_do_not_fall_when_the_engine_restarts(client: EngineClient) -> None:
    await collect(submit(client, [request(client, max_tokens=30)]))
    await until(lambda: client.stats.num_generation_tokens == 30)
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().state == "restarting")
    assert (client.stats.num_generation_tokens, client.stats.num_kv_blocks) == (30, 0)
    await until(lambda: client.status().state == "serving")
    await collect(submit(client, [request(client, max_tokens=12)]))
    await until(lambda: client.stats.num_generation_tokens == 42)
    assert client.stats.num_kv_blocks == 64


async def test_requests_that_end_with_the_engine_count_as_errors(client: EngineClient) -> None:
    streams = [submit(client, [request(client, max_tokens=100_000)]) for _ in range(2)]
    await collect(submit(client, [request(client)]))
    os.kill(pid_of(client), signal.SIGKILL)
    for stream in streams:
        with pytest.raises(EngineDeadError):
            await in_time(collect(stream))
    assert client.stats.finished_by_reason["error"] == 2


async def test_a_request_that_kills_the_engine_fails_with_the_signal(client: EngineClient) -> None:
    stream = submit(client, [request(client, fake_process.DEADLY_MAX_TOKENS)])
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await in_time(stream.take())


async def test_the_last_words_of_an_engine_reach_its_requests(client: EngineClient) -> None:
    stream = submit(client, [request(client, fake_process.FAULTY_MAX_TOKENS)])
    with pytest.raises(EngineDeadError, match="a fault of the engine's own"):
        await in_time(stream.take())


async def test_an_engine_whose_frames_cannot_be_read_is_replaced_at_once(client: EngineClient) -> None:
    streams = [submit(client, [request(client, n)]) for n in (10_000, fake_process.GARBLING_MAX_TOKENS)]
    for stream in streams:
        with pytest.raises(EngineDeadError, match="a frame of the engine could not be taken"):
            await in_time(collect(stream))
    await until(lambda: client.status().state == "serving")


async def test_a_backlog_of_frames_leaves_the_loop_to_others_in_between(client: EngineClient) -> None:
    loop, process, num_taken = asyncio.get_running_loop(), client._process, [0]
    assert process is not None
    take = process._take

    def count(message: FromEngine) -> None:
        num_taken[-1] += 1
        take(message)

    def turn() -> None:
        num_taken.append(0)
        turns[0] = loop.call_soon(turn)

    submit(client, [request(client, 10_000)])
    await asyncio.sleep(0.1)
    time.sleep(1)  # noqa: ASYNC251  # three frames come each 10 ms
    process._take = count  # type: ignore[method-assign]
    turns = [loop.call_soon(turn)]
    await asyncio.sleep(0.5)
    turns[0].cancel()
    assert sum(num_taken) > 100
    assert max(num_taken) <= 2 * FRAMES_AT_ONCE  # by itself and by the descriptor


async def test_an_engine_that_gives_no_sign_of_life_is_killed_and_replaced(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with started(patience=Patience(60, 1.0, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, fake_process.SILENCING_MAX_TOKENS)])
        await until(lambda: not client.status().is_alive)
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await in_time(stream.take())
        assert re.search(r'File ".*fake_process\.py", line \d+ in take', capfd.readouterr().err)
        await until(lambda: client.status().state == "serving")


async def test_a_model_error_at_the_first_start_is_final() -> None:
    async with started("model-error") as client:
        with pytest.raises(ModelError, match=r"config\.json is missing"):
            await in_time(client.wait_until_ready())
        assert client.status().num_restarts == 0


async def test_a_first_start_that_crashes_is_given_up_after_three_times() -> None:
    async with started("crash-at-start") as client:
        with pytest.raises(EngineDeadError, match="left with status 1"):
            await in_time(client.wait_until_ready())
        assert client.status().num_restarts == 2


async def test_between_starts_that_crash_the_engine_counts_as_alive_until_it_is_given_up() -> None:
    async with started("crash-at-start") as client:
        told = []
        while client.status().state != "stopped":
            told.append((client.status().is_alive, client._process is None))
            await asyncio.sleep(0.002)
        assert {is_alive for is_alive, _ in told} == {True}
        assert {is_between for _, is_between in told} == {True, False}
        assert not client.status().is_alive


async def test_an_engine_that_is_killed_and_comes_back_is_alive_in_between(client: EngineClient) -> None:
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client._process is None)
    assert (client.status().state, client.status().is_alive) == ("restarting", True)
    await until(lambda: client.status().state == "serving")


async def test_a_process_that_cannot_be_started_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = EngineClient(CONFIG, command=["/no/such/program"], back_off=QUICK)
    client.start()
    with pytest.raises(EngineDeadError, match="cannot be started"):
        await in_time(client.wait_until_ready())
    await client.close()
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    async with started() as client:
        with pytest.raises(EngineDeadError, match="TMPDIR"):
            await in_time(client.wait_until_ready())


async def test_a_process_that_was_started_ahead_is_the_first_life_alone() -> None:
    """It waits for its configuration, which names a model that may be downloaded meanwhile."""
    command = [sys.executable, "-P", "-m", "headway_testing.fake_process", "serve"]
    child = EngineChild(command)
    await asyncio.sleep(0.3)
    client = EngineClient(CONFIG, command=command, patience=BRIEF, back_off=QUICK, child=child)
    client.start()
    try:
        await in_time(client.wait_until_ready())
        assert pid_of(client) == child.pid
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: client.status().num_restarts == 1 and client.status().state == "serving")
        assert pid_of(client) != child.pid
    finally:
        await client.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert not Path(child.address.removeprefix("ipc://")).parent.exists()


async def test_an_engine_without_a_socket_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("headway.server.engine.process.zmq.Context", refuse)
    async with started() as client:
        with pytest.raises(EngineDeadError, match=r"no socket .*Too many open files"):
            await in_time(client.wait_until_ready())


async def test_a_fault_of_the_supervisor_leaves_nobody_waiting(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: EngineClient) -> NoReturn:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(EngineClient, "_live", fail)
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().state == "stopped")
    with pytest.raises(EngineDeadError):
        submit(client, [])


async def test_loading_shows_its_progress_and_takes_no_requests() -> None:
    async with started("slow-load") as client:
        with pytest.raises(EngineDeadError, match="loading"):
            submit(client, [request(client)])
        await until(lambda: 0 < client.status().progress < 0.9)
        assert (client.status().state, client.status().phase, client.status().is_alive) == (
            "loading", "load", True,
        )  # fmt: skip


async def test_draining_lets_requests_finish_that_run_or_were_being_prepared(client: EngineClient) -> None:
    streams = [submit(client, [request(client, max_tokens=60)])]
    client.drain(30)
    streams.append(submit(client, [request(client, max_tokens=60)]))
    for stream in streams:
        assert len((await collect(stream)).popitem()[1]) == 60
    assert client.status().state == "draining"


async def test_draining_ends_what_takes_too_long(client: EngineClient) -> None:
    stream = submit(client, [request(client, max_tokens=100_000)])
    client.drain(0.2)
    with pytest.raises(EngineDeadError, match=r"waited 0\.2 s"):
        await in_time(collect(stream))


@pytest.mark.parametrize("mode", ["serve", "silent", "deaf"])
async def test_close_leaves_no_process_and_no_folder(mode: str) -> None:
    async with started(mode) as client:
        await until(lambda: client._process is not None and client._process._process is not None)
        await asyncio.sleep(0.3)
        pid = pid_of(client)
        address = Path(f"/proc/{pid}/cmdline").read_text().strip("\0").split("\0")[-1]
        folder = Path(address.removeprefix("ipc://")).parent
        assert folder.is_dir()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert client.status().state == "stopped"
    assert not folder.exists()


async def test_the_engine_has_a_session_of_its_own(client: EngineClient) -> None:
    """Ctrl-C in the terminal must reach the server only."""
    assert os.getsid(pid_of(client)) != os.getsid(0)


async def test_a_paused_engine_holds_its_requests_until_it_may_go_on(client: EngineClient) -> None:
    running = submit(client, [request(client, max_tokens=300)])
    await running.take()
    client.pause()
    assert client.status().state == "paused"
    await asyncio.sleep(0.1)  # what was on its way has come
    running._events.clear()
    waiting = submit(client, [request(client, max_tokens=9)])
    await asyncio.sleep(0.1)
    assert (running._events, waiting._events) == (deque(), deque())
    client.resume()
    assert client.status().state == "serving"
    assert await in_time(collect(waiting)) == {1: list(range(101, 110))}


async def test_an_engine_that_was_paused_comes_back_paused(client: EngineClient) -> None:
    client.pause()
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().num_restarts == 1)
    await until(lambda: client.status().state == "paused")
    stream = submit(client, [request(client)])
    with pytest.raises(TimeoutError):
        await within(0.2, stream.take())
    client.resume()
    assert len((await in_time(collect(stream))).popitem()[1]) == 10


async def test_a_depth_that_was_set_holds_in_the_next_life(client: EngineClient) -> None:
    """The fake counts one draft for each position of the depth that it is told."""
    client.set_depth(2)
    await until(lambda: client.stats.draft_tokens_per_position == [1, 1])
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().num_restarts == 1)
    await until(lambda: client.stats.draft_tokens_per_position == [2, 2])


async def test_after_the_limit_was_lifted_the_next_life_begins_with_the_depth_that_it_finds_right(
    client: EngineClient,
) -> None:
    """Its check of the MTP head may come to another result."""
    client.set_depth(2)
    client.set_depth(1, survives_restart=False)
    await until(lambda: client.stats.draft_tokens_per_position == [1])
    os.kill(pid_of(client), signal.SIGKILL)
    await until(lambda: client.status().num_restarts == 1)
    await until(lambda: client.status().state == "serving")
    await in_time(collect(submit(client, [request(client)])))
    assert client.stats.draft_tokens_per_position == [1], "the next life was told a depth"


async def test_a_pause_while_it_loads_holds_from_the_start() -> None:
    async with started() as client:
        client.pause()
        await client.wait_until_ready()
        assert client.status().state == "paused"


async def test_what_was_paused_finishes_while_the_server_drains(client: EngineClient) -> None:
    client.pause()
    stream = submit(client, [request(client)])
    client.drain(seconds=10)
    assert client.status().state == "draining"
    assert len((await in_time(collect(stream))).popitem()[1]) == 10


async def test_a_stopped_engine_is_seen_by_ready_and_by_clients_and_is_replaced() -> None:
    async with started(patience=Patience(60, 1.0, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, max_tokens=100_000)])
        await stream.take()
        os.kill(pid_of(client), signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"no sign of life for 1 s .*is stopped"):
            await in_time(collect(stream))
        assert time.monotonic() - stopped > 0.9
        assert (client.status().state, client.status().is_alive) == ("restarting", False)
        assert client.stats.finished_by_reason["error"] == 1
        with pytest.raises(EngineDeadError, match="because: the engine gave no sign of life"):
            submit(client, [request(client)])
        await until(lambda: client.status().state == "serving")
        assert client.status().failure is None
        assert len((await collect(submit(client, [request(client)]))).popitem()[1]) == 10


async def test_an_engine_that_goes_on_in_time_is_kept(client: EngineClient) -> None:
    stream = submit(client, [request(client, max_tokens=90)])
    await stream.take()
    os.kill(pid_of(client), signal.SIGSTOP)
    await asyncio.sleep(0.5)
    assert (client.status().state, client.status().is_alive) == ("serving", True)
    os.kill(pid_of(client), signal.SIGCONT)
    await in_time(collect(stream))
    assert client.status().num_restarts == 0


@pytest.mark.parametrize("max_tokens", [fake_process.BUSY_MAX_TOKENS, fake_process.COMPILING_MAX_TOKENS])
async def test_a_long_step_is_not_taken_for_a_stuck_engine(max_tokens: int) -> None:
    """It says nothing for 2 s: it computes without ever giving the interpreter away, or waits for a
    compiler."""
    async with started(patience=Patience(60, 0.7, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, max_tokens)])
        for _ in range(15):
            assert client.status().is_alive
            await asyncio.sleep(0.1)
        await in_time(collect(stream))
        assert client.status().num_restarts == 0


async def test_an_engine_that_waits_and_looks_now_and_then_gives_no_sign() -> None:
    async with started(patience=Patience(60, 1.0, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, fake_process.WAITING_MAX_TOKENS)])
        with pytest.raises(EngineDeadError, match="used next to no processor time"):
            await in_time(collect(stream))


async def test_a_stopped_engine_is_replaced_whatever_its_children_compute() -> None:
    """A compiler of its session, or another rank, computes on."""
    async with started(patience=Patience(60, 0.5, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, fake_process.LONG_COMPILING_MAX_TOKENS)])
        await asyncio.sleep(0.3)
        os.kill(pid_of(client), signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="is stopped"):
            await within(fake_process.LONG_COMPILER_SECONDS - 1, collect(stream))


async def test_an_engine_with_a_stopped_rank_is_replaced_though_it_computes() -> None:
    """On a GPU a rank computes while it waits for another one."""
    async with started(patience=Patience(60, 0.5, 0.3)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, fake_process.RANKED_MAX_TOKENS)])
        children = Path(f"/proc/{pid_of(client)}/task/{pid_of(client)}/children")
        await until(lambda: children.read_text() != "")
        os.kill(int(children.read_text()), signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="is stopped"):
            await in_time(collect(stream))


async def test_a_step_that_never_ends_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    async with started(patience=Patience(60, 0.3, 0.3, step_seconds=1.0)) as client:
        await client.wait_until_ready()
        stream = submit(client, [request(client, fake_process.ENDLESS_MAX_TOKENS)])
        with pytest.raises(EngineDeadError, match="no sign of life for 1 s, though its process lives"):
            await in_time(collect(stream))
        await until(lambda: client.status().state == "serving")


async def test_a_start_that_is_stopped_is_replaced_while_a_slow_one_is_kept() -> None:
    async with started("slow-load", patience=Patience(60, 0.5, 0.3)) as client:
        await until(lambda: client.status().progress > 0.8)
        await asyncio.sleep(1.5)
        assert (client.status().is_alive, client.status().num_restarts) == (True, 0)
        os.kill(pid_of(client), signal.SIGSTOP)
        await until(lambda: client.status().num_restarts == 1)


async def test_an_api_process_that_was_itself_stopped_does_not_blame_the_engine() -> None:
    async with started(patience=Patience(60, 0.8, 0.3)) as client:
        await client.wait_until_ready()
        await asyncio.sleep(0.5)
        time.sleep(2)  # noqa: ASYNC251
        await asyncio.sleep(0.5)
        assert (client.status().state, client.status().num_restarts) == ("serving", 0)


async def test_starts_that_fail_are_told_with_their_reason_until_one_succeeds(tmp_path: Path) -> None:
    """The folder of the model vanishes, the engine dies, the folder returns."""
    folder = tmp_path / "model"
    folder.mkdir()
    async with started(f"needs:{folder}") as client:
        await client.wait_until_ready()
        folder.rmdir()
        os.kill(pid_of(client), signal.SIGKILL)
        await until(lambda: client.status().num_failed_starts >= 3)
        status = client.status()
        assert (status.state, status.is_alive) == ("restarting", False)
        assert status.failure == f"{folder} is missing"
        with pytest.raises(EngineDeadError, match=rf"times in a row.*{folder} is missing"):
            submit(client, [request(client)])
        for _ in range(20):  # also while the next start loads
            assert not client.status().is_alive
            await asyncio.sleep(0.02)
        folder.mkdir()
        await until(lambda: client.status().state == "serving")
        assert (client.status().is_alive, client.status().num_failed_starts) == (True, 0)
        assert len((await collect(submit(client, [request(client)]))).popitem()[1]) == 10


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["nothing-said", "a-count", "a-policy"],
)
async def test_threads_of_the_engine_spin_briefly_unless_the_user_has_decided(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    async with started() as client:
        await client.wait_until_ready()
        environment = Path(f"/proc/{pid_of(client)}/environ").read_bytes().decode().split("\0")
    counts = [line.partition("=")[2] for line in environment if line.startswith("GOMP_SPINCOUNT=")]
    assert counts == ([] if expected is None else [expected])
