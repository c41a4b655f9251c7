"""A real `headway serve` with the embedded model, started as a user starts it, for tests of any folder."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headway_testing.ports import free_port

START_SECONDS = 300.0
_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
KV_CACHE = ("--kv-cache-memory", "256MiB")  # the default, 1 GiB, takes 20 s where memory comes slowly


def get_plain(url: str, **options: Any) -> httpx.Response:
    """Sends GET by plain HTTP. httpx.get alone reads all certificates of the machine each time, for 40 ms of
    CPU time."""
    return httpx.get(url, verify=_NO_CERTIFICATES, **options)


def headway_command(*arguments: str, module: str = "headway") -> list[str]:
    """Returns the command line as the installed program has it, in this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


@dataclass
class Server:
    """A running daemon."""

    url: str
    process: subprocess.Popen[bytes]
    start_seconds: float = 0.0  # from its start to its first `200 /ready`

    def engine_pid(self) -> int:
        """The engine is the only child of the API process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        engines = [c for c in children if "headway.engine.process" in Path(f"/proc/{c}/cmdline").read_text()]
        assert len(engines) == 1, children
        return int(engines[0])

    def metric(self, name: str, **labels: str) -> float:
        """Returns one sample's value from the text that Prometheus would scrape."""
        lines = get_plain(f"{self.url}/metrics").text.splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith(name))
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) == 1, f"{name} {labels}: {found}"
        return found[0]

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            used = self.metric("headway_kv_cache_blocks", state="used")
            waiting = self.metric("headway_num_requests_waiting")
            if used == waiting == self.metric("headway_num_requests_running") == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"{used} blocks in use, {waiting} requests wait")


def start_server(
    *arguments: str, environment: Mapping[str, str] | None = None, module: str = "headway"
) -> Server:
    """Returns a server that is ready. module: the package whose `serve` it runs."""
    port = free_port()
    command = headway_command("serve", "--port", str(port), *arguments, module=module)
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}))
    server = Server(f"http://127.0.0.1:{port}", process)
    started = time.monotonic()
    while time.monotonic() - started < START_SECONDS:
        assert process.poll() is None, f"the server left with {process.returncode}"
        try:
            if get_plain(f"{server.url}/ready").status_code == 200:
                server.start_seconds = time.monotonic() - started
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server did not become ready")


def stop_server(server: Server) -> int:
    server.process.send_signal(signal.SIGTERM)
    return server.process.wait(timeout=40)


def running_server(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Yields a server with three drafts a round, on which many tests count, unless the arguments say
    otherwise."""
    running = start_server("--threads", "1", "--depth", "3", *KV_CACHE, *arguments, environment=environment)
    yield running
    assert stop_server(running) == 0


def running_scripted_server(*arguments: str) -> Iterator[Server]:
    """Yields a server whose model says what the user's last message tells it to: see scripted_process.py."""
    support = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    running = start_server(
        *arguments, environment={"PYTHONPATH": path}, module="headway_testing.scripted_process"
    )
    yield running
    assert stop_server(running) == 0


@dataclass
class SharedServers:
    """Servers by name, each started when it is first asked for. Mutable."""

    _running: dict[str, tuple[Iterator[Server], Server]] = field(default_factory=dict)

    def running(self, name: str, life: Callable[[], Iterator[Server]]) -> Server:
        """Returns the server of that name. Starts another one where the last has exited."""
        if name not in self._running or self._running[name][1].process.poll() is not None:
            started = life()
            self._running[name] = started, next(started)
        return self._running[name][1]

    def stop(self) -> None:
        """Stops all servers, each of which must exit by itself with code 0."""
        while self._running:
            _, (life, _server) = self._running.popitem()
            assert list(life) == []
