"""A real server whose model two processes compute."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import Server, get_plain, running_server
from headway_testing.engine_peer import is_running

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS, NOTICE_SECONDS, BACK_SECONDS, END_SECONDS = 3.0, 2.0, 30.0, 60.0
# A prompt whose logits take more memory than any step before.
LARGE = {"prompt": [300] * 200, "max_tokens": 1, "echo": True, "logprobs": 5, "ignore_eos": True}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def take_memory(pid: int) -> None:
    """From now on the process gets no more memory than it has."""
    taken = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (taken, taken))


Body = Mapping[str, object]
FAULTS = {"killed": kill, "stopped": stop, "out-of-memory": take_memory}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for temporary files of the server whose ranks share a model."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "cpu"))


@pytest.fixture(scope="module")
def shared(folder: Path, device: str) -> Iterator[Server]:
    arguments = "--tp", "2", "--engine-timeout", f"{TIMEOUT_SECONDS:g}", "--replay", "5", "--device", device
    yield from running_server(*arguments, environment={"TMPDIR": str(folder)})


@pytest.fixture(scope="module")
def bodies(device: str) -> list[Body]:
    """Requests that run for long enough to be hit by a fault."""
    same = {"max_tokens": 600 if device == "cuda" else 24, "logprobs": 2, "ignore_eos": True}
    return [
        same | {"prompt": f"def read_{seed}(path):\n", "temperature": seed % 3 / 2, "seed": seed}
        for seed in range(12)
    ]


@pytest.fixture(scope="module")
def wanted(device: str, bodies: list[Body]) -> list[object]:
    """What one process answers."""
    servers = running_server("--device", device)
    found = choices(next(servers), bodies)
    assert list(servers) == []
    return found


def choices(server: Server, bodies: Sequence[Body]) -> list[object]:
    def ask(body: Body) -> object:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(ask, bodies))


def pids_of_ranks(server: Server) -> list[int]:
    engine = server.engine_pid()
    return [engine, *map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())]


def is_ready(server: Server) -> bool:
    return get_plain(f"{server.url}/ready").status_code == 200


def wait_until(is_so: Callable[[], bool], seconds: float, since: float) -> None:
    while not is_so():
        assert time.monotonic() - since < seconds, f"it took longer than {seconds} s"
        time.sleep(0.02)


def survive(
    server: Server, folder: Path, fault: str, rank: int, bodies: list[Body], wanted: list[object]
) -> None:
    """A rank fails while requests run: they get their answers, and nothing of the engine is left."""
    lost, held = pids_of_ranks(server), held_by(server, folder)
    assert len(lost) == 2
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(choices, server, bodies)]
        while server.metric("headway_num_requests_running") == 0:
            assert not answers[0].done(), "the requests were over too early"
        FAULTS[fault](lost[rank])
        since = time.monotonic()
        if fault == "out-of-memory":
            answers.append(pool.submit(choices, server, [LARGE]))
            wait_until(lambda: not is_running(lost[rank]), END_SECONDS, since)
            since = time.monotonic()
        noticed = TIMEOUT_SECONDS + NOTICE_SECONDS if fault == "stopped" else NOTICE_SECONDS
        # A machine on which a start takes half of what a restart may take is busy with other things.
        slowness = max(1.0, 2 * server.start_seconds / BACK_SECONDS)
        wait_until(lambda: not is_ready(server), noticed * slowness, since)
        wait_until(lambda: is_ready(server), BACK_SECONDS * slowness, since)
        assert answers[0].result() == wanted
        assert all(answer.result() for answer in answers)
    assert [pid for pid in lost if is_running(pid)] == []
    # A connection of a client may be open for a moment still.
    wait_until(
        lambda: all(now <= before for now, before in zip(held_by(server, folder), held, strict=True)),
        END_SECONDS,
        time.monotonic(),
    )


def held_by(server: Server, folder: Path) -> tuple[int, int]:
    """Returns the numbers of temporary files of the server and its engine, and of files and sockets that the
    server has open, while no request runs."""
    server.wait_until_idle()
    return len(list(folder.rglob("*"))), len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


ON_TWO_GPUS = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", ON_TWO_GPUS], indirect=True)
def test_two_ranks_answer_as_one_does(shared: Server, bodies: list[Body], wanted: list[object]) -> None:
    assert get_plain(f"{shared.url}/ready").json()["engine"]["num_ranks"] == 2
    assert choices(shared, bodies) == wanted


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_requests_outlive_a_rank(
    fault: str, rank: int, shared: Server, folder: Path, bodies: list[Body], wanted: list[object]
) -> None:
    survive(shared, folder, fault, rank, bodies, wanted)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("device", [ON_TWO_GPUS], indirect=True)
@pytest.mark.timeout(300)
def test_requests_outlive_a_rank_on_two_gpus(
    fault: str, rank: int, shared: Server, folder: Path, bodies: list[Body], wanted: list[object]
) -> None:
    for _ in range(3):
        survive(shared, folder, fault, rank, bodies, wanted)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_requests_outlive_ranks_again_and_again(
    shared: Server, folder: Path, bodies: list[Body], wanted: list[object]
) -> None:
    for _ in range(20):
        for fault in FAULTS:
            for rank in (0, 1):
                survive(shared, folder, fault, rank, bodies, wanted)
