"""Turns by client, bounds on those who wait, and a process that jobs may harm."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headway.server.base import worker_pool
from headway.server.base.errors import ApiError
from headway.server.base.worker_pool import CLIENT, Outcome, Purpose, WorkerPool

# A job is a line of Python; the answer is what it sets `out` to.
WORKER = """
import os, signal, time
from headway.server.base.worker_process import main
kept = []
def answer(payload):
    scope = {"kept": kept, "os": os, "time": time, "signal": signal, "out": b""}
    exec(payload.decode(), scope)
    return scope["out"]
main(lambda hello: answer)
"""
BUSY = "while True: pass"


def purpose(seconds: float = 0.3, quick_seconds: float = 0.05) -> Purpose:
    return Purpose("runs jobs", "grammar_unavailable", seconds, quick_seconds, bytes)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool((sys.executable, "-P", "-c", WORKER), purpose())
    yield pool
    await pool.close()


async def run(pool: WorkerPool, job: str, client: str = "") -> Outcome:
    CLIENT.set(client)
    return await pool.run(job.encode())


async def test_a_job_is_answered_whatever_its_size(pool: WorkerPool) -> None:
    outcome = await run(pool, "out = b'x' * 5_000_000 #" + "y" * 5_000_000)
    assert (outcome.exit_code, len(outcome.payload)) == (0, 5_000_000)


@pytest.mark.parametrize(
    ("job", "code"),
    [("os.abort()", -signal.SIGABRT), ("raise ValueError", 1), ("bytes(2**33)", 1), (BUSY, -signal.SIGPROF)],
    ids=["abort", "fault", "memory", "time"],
)
async def test_a_job_that_ends_its_process_is_told_and_the_next_is_answered_at_once(
    pool: WorkerPool, job: str, code: int
) -> None:
    await pool.start()
    process = pool.process
    for _ in range(3):
        assert (await run(pool, job)).exit_code == code
        async with asyncio.timeout(30):
            assert (await run(pool, "out = b'fine'")).payload == b"fine"
    assert pool.process is process


async def test_processor_time_counts_and_not_the_clock(pool: WorkerPool) -> None:
    outcome = await run(pool, "time.sleep(1.2); out = b'fine'")
    assert outcome.payload == b"fine"
    assert outcome.seconds < 0.1


async def test_a_job_that_is_not_quick_is_answered_too(pool: WorkerPool) -> None:
    job = "end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\nout = b'fine'"
    assert (await run(pool, job)).payload == b"fine"


async def test_memory_that_a_job_keeps_is_given_back(pool: WorkerPool) -> None:
    sizes = "kept.append(b'x' * 100_000_000); out = str(len(kept)).encode()"
    assert [(await run(pool, sizes)).payload for _ in range(4)] == [b"1"] * 4


async def test_who_took_less_time_has_the_next_turn(pool: WorkerPool) -> None:
    done: list[str] = []

    async def job(client: str) -> None:
        await run(pool, BUSY, client)
        done.append(client)

    await pool.start()
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(job("much"))
        await asyncio.sleep(0.2)
        group.create_task(job("little"))
    assert "little" in done[:3]


async def test_the_newest_of_the_client_with_most_that_wait_gives_way(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_WAITING", 4)
    await pool.start()
    many = [asyncio.create_task(run(pool, "time.sleep(0.5)", "many")) for _ in range(12)]
    await asyncio.sleep(0.1)
    refused = [task for task in many if task.done() and task.exception() is not None]
    assert len(refused) == 12 - worker_pool.NUM_QUICK - 4
    with pytest.raises(ApiError, match="4 requests that wait, which is the limit; try again") as caught:
        await refused[0]
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    assert (await run(pool, "out = b'fine'", "one")).payload == b"fine"
    await asyncio.gather(*many, return_exceptions=True)


async def test_who_waits_too_long_is_told(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "WAIT_SECONDS", 0.1)
    jobs = [run(pool, "time.sleep(0.5)") for _ in range(worker_pool.NUM_QUICK + 1)]
    outcomes = await asyncio.gather(*jobs, return_exceptions=True)
    (late,) = [outcome for outcome in outcomes if isinstance(outcome, ApiError)]
    assert "had no time for this in 0.1 s; try again later" in str(late)


async def test_what_clients_took_is_forgotten_in_time_and_bounded_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_CLIENTS", 2)
    used = worker_pool._ProcessorTime()
    for client in "abc":
        used.add(client, 1.0)
    assert (used.of("a"), 0.5 < used.of("c") <= 1.0) == (0.0, True)
    monkeypatch.setattr(worker_pool, "HALF_LIFE_SECONDS", 0.05)
    await asyncio.sleep(0.2)
    assert 0.0 < used.of("c") < 0.1


async def test_no_process_outlives_the_pool(pool: WorkerPool) -> None:
    await pool.start()
    pids = {int((await run(pool, "out = str(os.getpid()).encode()")).payload) for _ in range(2)}
    await pool.close()
    async with asyncio.timeout(30):
        while any(is_alive(pid) for pid in pids):
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for is not."""
    stat = Path(f"/proc/{pid}/stat")
    return os.path.exists(stat) and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_an_exchange_of_a_process_that_is_gone_leaves_the_next_one_alone(pool: WorkerPool) -> None:
    await pool.start()
    late = asyncio.create_task(run(pool, "time.sleep(30)"))
    await asyncio.sleep(0.1)
    (lane,) = [lane for lane in pool._lanes if lane.is_quick and lane not in pool._free]
    await pool._stop()
    await pool.start()
    process = pool.process
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        await pool._exchange(lane, b"", "")
    with pytest.raises(ApiError, match="try again"):
        await late
    assert pool.process is process
    assert (await run(pool, "out = b'fine'")).payload == b"fine"


async def test_a_lane_that_comes_as_the_wait_ends_is_not_lost(pool: WorkerPool) -> None:
    await pool.start()
    turn = worker_pool._Turn("", is_quick=True, lane=asyncio.get_running_loop().create_future())
    lane = next(lane for lane in pool._free if lane.is_quick)
    pool._free.remove(lane)
    turn.lane.set_result(lane)
    pool._give_up(turn)
    assert lane in pool._free


async def test_what_is_closed_leaves_no_socket_open(pool: WorkerPool) -> None:
    """Of a process that has ended by itself there is nothing to wait for but the sockets."""
    await pool.start()
    assert pool.process is not None
    sockets = [lane.writer.get_extra_info("socket") for lane in pool._lanes]
    pool.process.kill()
    await pool.process.wait()
    await pool.close()
    assert [sock.fileno() for sock in sockets] == [-1] * len(sockets)
