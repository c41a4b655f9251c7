"""A fleet of two servers with a GPU each."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

import pytest
from headway_testing.daemon import headway_command, running_server
from headway_testing.fleets import (
    NEEDS_RAY,
    completion,
    end,
    load_of,
    started,
    wait_until_begun,
)
from headway_testing.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.fleet,
    pytest.mark.timeout(500),
    NEEDS_RAY,
]
NUM_STREAMS = 32
FLAGS = ("--depth", "0", "--kv-cache-memory", "1GiB")
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True}


def gpus_of(server: int) -> str:
    variables = Path(f"/proc/{server}/environ").read_bytes().decode().split("\0")
    return next(line for line in variables if line.startswith("CUDA_VISIBLE_DEVICES="))


def test_streams_outlive_one_of_two_gpus_servers(tmp_path: Path) -> None:
    """Each server has a GPU and a share of the streams. When one is killed, all streams go on."""
    servers = running_server(*FLAGS)
    single = next(servers)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        wanted = list(pool.map(lambda i: completion(single.url, i, **LONG), range(NUM_STREAMS)))
        assert list(servers) == []
        port = free_port()
        command = headway_command("fleet", "--replicas", "2", *FLAGS, "--port", str(port))
        fleet = started(command, port, tmp_path)
        try:
            fleet.wait_for_replicas(2, without=0)
            found = fleet.servers()
            assert len({gpus_of(server) for server in found}) == 2
            begun = Semaphore(0)
            asked = [pool.submit(completion, fleet.url, i, begun=begun, **LONG) for i in range(NUM_STREAMS)]
            wait_until_begun(begun, NUM_STREAMS // 4)
            assert min(load_of(server)["num_requests"] for server in found) > NUM_STREAMS / 16
            assert not any(future.done() for future in asked)
            os.kill(found[0], signal.SIGKILL)
            assert [future.result() for future in asked] == wanted
            fleet.wait_for_replicas(2, without=found[0])
        finally:
            assert end(fleet) == 0
