"""A fleet on Ray that a test starts, and what its processes are."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import pytest

from headway_testing.daemon import START_SECONDS

NEEDS_RAY = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-fleet"
)
QUIET = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
LASTING = {"max_tokens": 200, "ignore_eos": True}


@dataclass(frozen=True)
class Fleet:
    """A running `headway fleet`, or Ray's own command with a configuration."""

    url: str
    process: subprocess.Popen[bytes]

    def servers(self) -> list[int]:
        """Returns the processes of `headway serve`."""
        found = [pid for pid in descendants(self.process.pid) if "--unix-socket" in command_of(pid)]
        return sorted(pid for pid in found if "headway.server.fleet.bound" not in command_of(pid))

    def ingresses(self) -> list[int]:
        """Returns the actors that accept the fleet's clients."""
        actors = descendants(self.process.pid)
        return sorted(
            pid for pid in actors if command_of(pid).startswith("ray::ServeReplica:headway:Ingress")
        )

    def replicas(self) -> dict[str, int]:
        """Returns how many replicas there are in each state, by the fleet's metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return {
            line.split('"')[1]: int(float(line.split()[1]))
            for line in lines
            if line.startswith("headway_fleet_replicas{")
        }

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_for_replicas(self, number: int, *, without: int) -> None:
        """Waits until the wanted number of servers run, the killed one not among them, and all get
        requests."""
        wait_until(lambda: len(set(self.servers()) - {without}) == number)
        wait_until(lambda: self.replicas() == {"running": number})


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            children.setdefault(parent_of(int(folder.name)), []).append(int(folder.name))
        except OSError:
            continue
    found, todo = [], [root]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
    return found


def load_of(server: int) -> dict[str, int]:
    """Returns how many requests one server has."""
    path = command_of(server).partition("--unix-socket ")[2].split()[0]
    with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        return client.get("http://localhost/load").json()


def wait_until(is_so: Callable[[], bool], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def started(
    command: list[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
) -> Fleet:
    log = folder / "log"
    environment = os.environ | QUIET | dict(environment or {})
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=environment)
    fleet = Fleet(f"http://127.0.0.1:{port}", process)
    try:
        wait_until(lambda: process.poll() is not None or fleet.is_ready())
        assert process.poll() is None
    except AssertionError:
        process.kill()
        process.wait()
        raise AssertionError(log.read_text(errors="replace")) from None
    return fleet


def end(fleet: Fleet, number: signal.Signals = signal.SIGTERM) -> int:
    """Returns the exit status, and asserts that no process is left."""
    below = {pid: command_of(pid) for pid in descendants(fleet.process.pid)}
    fleet.process.send_signal(number)
    status = fleet.process.wait(timeout=90)
    wait_until(lambda: not any(command and command_of(pid) == command for pid, command in below.items()), 20)
    return status


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def completion(url: str, number: int, *, begun: Semaphore | None = None, **fields: Any) -> str:
    """Returns the text. begun: released once, when part of the answer has come."""
    body = {
        "prompt": f"def f{number}(x):\n    ",
        "max_tokens": 60,
        "seed": number,
        "temperature": 0.9,
    } | fields
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        for piece in answer.iter_text():
            if begun and not text:
                begun.release()
            text += piece
    assert answer.status_code == 200, text
    if fields.get("stream"):
        events = events_of(text)
        assert text.endswith("data: [DONE]\n\n")
        assert len({event["id"] for event in events}) == 1
        return "".join(event["choices"][0]["text"] for event in events)
    return json.loads(text)["choices"][0]["text"]


def wait_until_begun(begun: Semaphore, number: int) -> None:
    """Waits until that many answers have begun, whatever the machine's pace."""
    for _ in range(number):
        assert begun.acquire(timeout=START_SECONDS)
