"""The image, built by `build_image.sh` and run by podman: serves, is healthy, drains. `make
test-container`."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from headway_testing.ports import free_port

pytestmark = pytest.mark.container

IMAGE = "localhost/headway:test"
START_SECONDS = 120.0
DRAIN_SECONDS = 30.0
STREAMED_TOKENS = 100
# The file system is read-only but for what the manifests mount too. Healthchecks on a timer need systemd.
RUN = [
    "run", "--detach", "--network", "host", "--memory", "4g", "--ulimit", "nofile=1024:1024",
    "--ulimit", "nproc=4096:4096", "--health-interval=disable", "--read-only", "--tmpfs", "/tmp",
    "--tmpfs", "/var/lib/headway:mode=1777",
]  # fmt: skip


def podman(*arguments: str) -> str:
    runtime = shutil.which("runc", path="/usr/sbin:/usr/bin")
    assert runtime is not None, "runc is not installed: apt-get install runc"
    command = ["podman", "--runtime", runtime, "--cgroup-manager", "cgroupfs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout.strip()


@dataclass
class Container:
    """start_seconds: from `run` to the first answer of /ready."""

    name: str
    url: str
    start_seconds: float = 0.0


@pytest.fixture
def container() -> Iterator[Container]:
    port = free_port()
    started = time.monotonic()
    name = podman(*RUN, "--env", f"HEADWAY_PORT={port}", "--env", "HEADWAY_THREADS=1", IMAGE)
    running = Container(name, f"http://127.0.0.1:{port}")
    try:
        while time.monotonic() < started + START_SECONDS:
            with suppress(httpx.TransportError):
                if httpx.get(f"{running.url}/ready").status_code == 200:
                    break
            assert podman("inspect", "--format", "{{.State.Running}}", name) == "true", podman("logs", name)
            time.sleep(0.1)
        running.start_seconds = time.monotonic() - started
        yield running
    finally:
        podman("rm", "--force", "--time", "0", name)


def test_a_container_serves_the_embedded_model_to_the_outside_and_is_healthy(container: Container) -> None:
    print(f"ready after {container.start_seconds:.1f} s")
    podman("healthcheck", "run", container.name)
    body = {"prompt": "def read_config(path):\n", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{container.url}/v1/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 16
    listening = Path("/proc/net/tcp").read_text()
    port = int(container.url.rpartition(":")[2])
    assert f" 00000000:{port:04X} " in listening, "it must listen on 0.0.0.0"


def test_it_does_not_run_as_root(container: Container) -> None:
    assert podman("exec", container.name, "id", "-u") == "10001"
    assert podman("exec", container.name, "headway", "--version").startswith("headway ")


def test_a_healthcheck_fails_when_nothing_answers(container: Container) -> None:
    kind, *check = json.loads(podman("inspect", container.name))[0]["Config"]["Healthcheck"]["Test"]
    assert kind == "CMD"
    podman("exec", container.name, *check)
    with pytest.raises(AssertionError, match="refused"):
        podman("exec", "--env", "HEADWAY_PORT=1", container.name, *check)


def test_sigterm_lets_a_stream_finish_and_leaves_in_time(container: Container) -> None:
    body = {
        "prompt": "import os\n",
        "max_tokens": STREAMED_TOKENS,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", f"{container.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        assert '"finish_reason":null' in first
        stopped = time.monotonic()
        podman("kill", "--signal", "TERM", container.name)
        *_, last, done = lines
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == STREAMED_TOKENS
    assert podman("wait", container.name) == "0"
    assert time.monotonic() - stopped < DRAIN_SECONDS
