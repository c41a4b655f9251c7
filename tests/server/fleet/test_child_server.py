"""The server of a replica: what its end tells, and that it does not outlive its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.server.fleet.child_server import ChildServer
from headway.server.fleet.messages import ReplicaError

SLEEPER = ["-c", "import time; print('started', flush=True); time.sleep(60)"]
# A parent that starts a bound child and tells its process id.
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-P", "-m", "headway.server.fleet.bound", str(os.getpid()), sys.executable, *sys.argv[1:]]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_bound_child_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-P", "-c", PARENT, *SLEEPER], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_child_whose_parent_has_gone_does_not_start() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "headway.server.fleet.bound",
        str(os.getpid() + 1),
        sys.executable,
        *SLEEPER,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "has ended" in done.stderr


def test_a_start_that_fails_tells_why(capfd: pytest.CaptureFixture[str]) -> None:
    server = ChildServer("/no/model", {"max-running": "3"})
    with pytest.raises(ReplicaError, match="status 1: headway: /no/model is neither a folder nor"):
        server.wait_until_ready(60.0)
    server.end(0.0)
    assert not Path(server.path).parent.exists()
    assert "/no/model" in capfd.readouterr().err, "its log is in this process's"


def test_its_flags_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the values is wrong, and the error names the one that was read."""
    monkeypatch.setenv("HEADWAY_MAX_RUNNING", "of-the-environment")
    server = ChildServer(None, {"max-running": "of-the-fleet"})
    with pytest.raises(ReplicaError, match="max-running is 'of-the-fleet'"):
        server.wait_until_ready(60.0)
    server.end(0.0)
