"""A real server whose model two processes compute."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import Server, get_plain, running_server
from headway_testing.engine_peer import is_running

pytestmark = pytest.mark.slow

BODIES = [
    {
        "prompt": f"def read_{seed}(path):\n",
        "max_tokens": 24,
        "temperature": seed % 3 / 2,
        "seed": seed,
        "logprobs": 2,
        "ignore_eos": True,
    }
    for seed in range(12)
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    yield from running_server("--tp", "2", "--engine-timeout", "3")


@pytest.fixture(scope="module")
def alone() -> Iterator[Server]:
    yield from running_server()


def choices(server: Server) -> list[object]:
    def ask(body: dict[str, object]) -> object:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    with ThreadPoolExecutor(6) as pool:
        return list(pool.map(ask, BODIES))


def rank_pid(server: Server) -> int:
    engine = server.engine_pid()
    (rank,) = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
    return rank


def test_two_ranks_answer_as_one_does(shared: Server, alone: Server) -> None:
    assert get_plain(f"{shared.url}/ready").json()["engine"]["num_ranks"] == 2
    assert choices(shared) == choices(alone)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_requests_outlive_a_rank(shared: Server, alone: Server, number: signal.Signals) -> None:
    """Nothing of the engine that it belonged to is left."""
    wanted, lost = choices(alone), rank_pid(shared)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(choices, shared)
        while shared.metric("headway_num_requests_running") == 0:
            assert not answers.done(), "the requests were over too early"
        os.kill(lost, number)
        assert answers.result() == wanted
    assert rank_pid(shared) != lost
    assert not is_running(lost)
