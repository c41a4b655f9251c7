"""Signals to a daemon with a request in flight: the first lets it finish, the second ends all at once and
leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import KV_CACHE, START_SECONDS, Server, headway_command

from headway.server.engine.private_folder import PREFIX

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def client(folder: Path) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(folder / "socket"))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
        yield client


def test_the_second_signal_ends_at_once_and_leaves_nothing(folder: Path, client: httpx.Client) -> None:
    (folder / f"{PREFIX}12345678").mkdir()  # of a server that was killed
    command = headway_command("serve", "--unix-socket", str(folder / "socket"), "--threads", "1", *KV_CACHE)
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)})
    try:
        wait_until_ready(folder / "socket", client, process)
        assert len(list(folder.glob(f"{PREFIX}*"))) == 1
        engine_pid = Server("", process).engine_pid()
        body = {"prompt": "def f(", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(folder.iterdir()) == []
    deadline = time.monotonic() + 30
    while is_running(engine_pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_ready(path: Path, client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    """Connections to the path are taken as soon as it is there, and wait until they are served."""
    deadline = time.monotonic() + START_SECONDS
    while not path.exists() or client.get("/ready").status_code != 200:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
