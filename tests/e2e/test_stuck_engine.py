"""A real engine process that is stopped: what probes and clients see, and that it is replaced."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from headway_testing.daemon import KV_CACHE, start_server, stop_server

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 3


def ask(url: str, max_tokens: int) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def test_probes_and_clients_learn_of_a_stopped_engine_which_is_replaced() -> None:
    server = start_server(
        "--threads", "1", "--depth", "0", *KV_CACHE, "--engine-timeout", str(TIMEOUT_SECONDS), "--replay", "0"
    )
    try:
        stopped_pid = server.engine_pid()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(ask, server.url, 1500)
            time.sleep(0.3)
            os.kill(stopped_pid, signal.SIGSTOP)
            stopped = time.monotonic()
            failed = answer.result()
        assert time.monotonic() - stopped < TIMEOUT_SECONDS + 30
        assert failed.status_code == 503
        assert "is stopped (SIGSTOP?)" in failed.json()["error"]["message"]
        ready = httpx.get(f"{server.url}/ready")
        assert (ready.status_code, ready.json()["is_ready"]) == (503, False)
        deadline = time.monotonic() + 120
        is_on_its_way = False
        while httpx.get(f"{server.url}/ready").status_code != 200:
            assert time.monotonic() < deadline, "no other engine serves"
            time.sleep(0.1)
            is_alive = httpx.get(f"{server.url}/health").status_code == 200
            assert is_alive or not is_on_its_way, "another engine was on its way"
            is_on_its_way = is_alive
        assert is_on_its_way
        assert server.engine_pid() != stopped_pid
        assert ask(server.url, 4).status_code == 200
    finally:
        assert stop_server(server) == 0
