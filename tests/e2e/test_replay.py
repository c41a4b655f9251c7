"""Requests outlive their engine: what they get while it is killed is what they get undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing.daemon import KV_CACHE, start_server, stop_server
from headway_testing.deadly_process import DEADLY_SALT
from headway_testing.exact_http import FAMILIES, HEADWAY
from headway_testing.killing import Killing, answers_before_and_during, mixed_requests

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PLANTED = {"prompt": "def f(x):", "max_tokens": 40, "seed": 1, "ignore_eos": True}


def kill_while_asking(
    family: str, folder: Path, flags: Sequence[str], num_kills: int, num_requests: int, *, stops: bool = True
) -> Killing:
    model = FAMILIES[family].make(folder / family)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    requests = mixed_requests(num_kills, num_requests, vocab_size)
    server = start_server(
        str(model), *HEADWAY, *KV_CACHE, "--threads", "1", "--replay", "100", "--engine-timeout", "1", *flags
    )
    try:
        chance = random.Random(f"{family}-{num_kills}")
        killing = asyncio.run(answers_before_and_during(server, requests, num_kills, chance, stops=stops))
        assert server.metric("headway_engine_restarts_total") >= num_kills
        assert server.metric("headway_requests_replayed_total") > 0
        print(killing)
    finally:
        assert stop_server(server) == 0
    return killing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("mimo", ["--depth", "3"]),
        ("qwen3.5", ["--depth", "3", "--drafter", "ngram"]),
    ],
)
def test_answers_are_the_same_whether_or_not_the_engine_is_killed(
    family: str, flags: list[str], tmp_path: Path
) -> None:
    killing = kill_while_asking(family, tmp_path, flags, 2, 12)
    assert killing.differences == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("mimo", ["--depth", "auto"]),
        ("qwen3.5", ["--depth", "3"]),
        ("qwen3.5", ["--depth", "3", "--drafter", "ngram"]),
    ],
)
def test_a_hundred_kills_change_no_answer(family: str, flags: list[str], tmp_path: Path) -> None:
    killing = kill_while_asking(family, tmp_path, flags, 100, 200)
    assert killing.differences == []
    assert killing.num_kills == 100


@pytest.mark.slow
def test_a_request_that_ends_each_engine_is_the_only_one_that_fails() -> None:
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    server = start_server(
        "--threads", "1", "--depth", "3", *KV_CACHE, environment={"PYTHONPATH": path},
        module="headway_testing.deadly_process",
    )  # fmt: skip

    def ask(seed: int, **fields: Any) -> httpx.Response:
        body = PLANTED | {"seed": seed} | fields
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    try:
        with ThreadPoolExecutor(16) as pool:
            wanted = [answer.json()["choices"] for answer in pool.map(ask, range(15))]
            others = [pool.submit(ask, seed) for seed in range(7)]
            deadly = pool.submit(ask, 99, cache_salt=DEADLY_SALT)
            others += [pool.submit(ask, seed) for seed in range(7, 15)]
            assert [other.result().json()["choices"] for other in others] == wanted
        assert deadly.result().status_code == 503
        assert "SIGKILL" in deadly.result().json()["error"]["message"]
        assert server.metric("headway_engine_restarts_total") == 3
    finally:
        assert stop_server(server) == 0
