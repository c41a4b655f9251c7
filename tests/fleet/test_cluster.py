"""A fleet that Ray's own command starts from a configuration: it grows and shrinks by load, takes a changed
configuration, and loses an ingress, while streams go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import httpx
import pytest
import yaml
from headway_testing.daemon import Server, start_server, stop_server
from headway_testing.fleets import (
    LASTING,
    NEEDS_RAY,
    Fleet,
    command_of,
    completion,
    descendants,
    end,
    started,
    wait_until,
    wait_until_begun,
)
from headway_testing.ports import free_port

pytestmark = [
    pytest.mark.fleet,
    NEEDS_RAY,
]
SERVE = {"threads": 1, "depth": 3, "kv-cache-memory": "256MiB"}
FLAGS = [text for name, value in SERVE.items() for text in (f"--{name}", str(value))]
# Of Ray itself: how often replicas tell their load, and the key to its own ports.
ENVIRONMENT = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
}
TARGET, NUM_STREAMS = 4, 12
# A machine of two cores has room for them all, and for new ones before the old ones end.
SMALL = {"ray_actor_options": {"num_cpus": 0.1}, "max_surge_percent": 100}
AUTOSCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": TARGET, "upscale_delay_s": 1,
    "downscale_delay_s": 3, "look_back_period_s": 12,
    "policy": {"policy_function": "headway.server.fleet.scaling:by_requests_and_kv_cache"},
}  # fmt: skip


def written(folder: Path, port: int, **serve: Any) -> Path:
    """Returns the file of a configuration. serve: flags of each server."""
    application = {
        "name": "headway", "route_prefix": "/", "import_path": "headway.server.fleet.application:build",
        "args": {"replicas": 1, "gpus": 0, "serve": SERVE | serve},
        "deployments": [
            {"name": "Ingress", "num_replicas": 2, **SMALL},
            {"name": "Replica", "autoscaling_config": AUTOSCALING, **SMALL},
        ],
    }  # fmt: skip
    http = {"host": "127.0.0.1", "port": port}
    file = folder / "serve.yaml"
    file.write_text(
        yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http, "applications": [application]})
    )
    return file


def serve_run(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "ray.serve.scripts", "run", *arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Fleet]:
    port = free_port()
    running = started(serve_run(str(written(folder, port))), port, folder, ENVIRONMENT)
    yield running
    end(running, signal.SIGINT)


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    """The texts of a single server."""
    server: Server = start_server(*FLAGS)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        texts = list(pool.map(lambda i: completion(server.url, i, **LASTING), range(NUM_STREAMS)))
    assert stop_server(server) == 0
    return texts


@contextmanager
def streaming(cluster: Fleet, wanted: list[str], number: int) -> Iterator[None]:
    """So many clients stream all the while, one text after the other, and each is the right one."""
    is_over = Event()

    def ask(client: int) -> int:
        num_asked = 0
        while not is_over.is_set():
            assert completion(cluster.url, client, stream=True, **LASTING) == wanted[client]
            num_asked += 1
        return num_asked

    with ThreadPoolExecutor(number) as pool:
        clients = [pool.submit(ask, client) for client in range(number)]
        try:
            yield
        finally:
            is_over.set()
        assert all(client.result() > 0 for client in clients)


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_an_ingress_that_is_killed_ends_its_own_streams_alone(
    cluster: Fleet, wanted: list[str], num_kills: int
) -> None:
    for _ in range(num_kills):
        kill_an_ingress(cluster, wanted)
        assert completion(cluster.url, 0, stream=True, **LASTING) == wanted[0]


def kill_an_ingress(cluster: Fleet, wanted: list[str]) -> None:
    wait_until(lambda: len(cluster.ingresses()) == 2)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        # Ray's proxy asks ingresses for their load, and knows it for 10 s; else all streams may go to one.
        list(pool.map(lambda _: httpx.get(f"{cluster.url}/version", timeout=60), range(2 * NUM_STREAMS)))
        begun = Semaphore(0)
        asked = [
            pool.submit(completion, cluster.url, i, begun=begun, stream=True, **LASTING)
            for i in range(NUM_STREAMS)
        ]
        wait_until_begun(begun, NUM_STREAMS)
        assert not any(future.done() for future in asked)
        killed = cluster.ingresses()[0]
        os.kill(killed, signal.SIGKILL)
        broken = [i for i, future in enumerate(asked) if is_broken(future, wanted[i])]
    assert 0 < len(broken) < NUM_STREAMS
    wait_until(lambda: len(set(cluster.ingresses()) - {killed}) == 2)


def is_broken(asked: Future[str], wanted: str) -> bool:
    """Its client sees that; a text that has come whole is right."""
    error = asked.exception()
    assert isinstance(error, httpx.TransportError | None), error
    assert error is not None or asked.result() == wanted
    return error is not None


def test_replicas_come_and_go_with_the_load(cluster: Fleet, wanted: list[str]) -> None:
    assert cluster.replicas()["running"] == 1
    with streaming(cluster, wanted, NUM_STREAMS):
        wait_until(lambda: cluster.replicas()["running"] == 2)
    with streaming(cluster, wanted, 1):
        wait_until(lambda: cluster.replicas() == {"running": 1})
    wait_until(lambda: len(cluster.servers()) == 1)


def address_of(cluster: Fleet) -> str:
    """Returns where Ray's own programs find this cluster."""
    commands = " ".join(command_of(pid) for pid in descendants(cluster.process.pid))
    found = re.search(r"--gcs-address=(\S+)", commands)
    assert found, commands
    return found[1]


def test_a_changed_configuration_drops_no_stream(cluster: Fleet, wanted: list[str], folder: Path) -> None:
    before = set(cluster.servers()) | set(cluster.ingresses())
    port = int(cluster.url.rpartition(":")[2])
    command = serve_run(
        "--non-blocking", "--address", address_of(cluster), str(written(folder, port, **{"max-running": 48}))
    )
    with streaming(cluster, wanted, 2):
        done = subprocess.run(
            command, env=os.environ | ENVIRONMENT, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not before & {*cluster.servers(), *cluster.ingresses()})
        wait_until(lambda: cluster.replicas() == {"running": 1})
