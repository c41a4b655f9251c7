"""A `headway serve` as a child process: its start, the wait until it is ready, and its end.

It listens at a path in a folder that only its user can read. The fleet's flags reach it as a configuration
file on its standard input: other users could see a command line, and a file would remain if the parent is
killed. Variables of the environment would override the file, so that those of the given flags are removed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import yaml

from headway.server.engine.private_folder import SOCKET, private_folder
from headway.server.fleet.messages import ReplicaError

POLL_SECONDS = 0.1
KILL_SECONDS = 10.0  # in addition to its own time to drain
Texts = Mapping[str, str | Sequence[str]]


class ChildServer:
    """Mutable: starts the server when it is made; its owner ends it."""

    def __init__(
        self,
        model: str | None,
        flags: Texts,
        *,
        environment: Mapping[str, str] | None = None,
        module: str = "headway",
    ) -> None:
        """flags: of `headway serve`, by name. environment: variables in addition to this process's own.
        Raises OSError."""
        with ExitStack() as taken:
            self.path = str(taken.enter_context(private_folder()) / SOCKET)
            bound = ("headway.server.fleet.bound", str(os.getpid()), sys.executable, "-P", "-m", module)
            command = [sys.executable, "-P", "-m", *bound, "serve", *([] if model is None else [model])]
            self._process = subprocess.Popen(
                [*command, "--config", "/dev/stdin", "--unix-socket", self.path],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env=_environment(flags) | dict(environment or {}),
            )
            assert self._process.stdin is not None
            with self._process.stdin as stdin:
                stdin.write(yaml.safe_dump(dict(flags)).encode())
            self._taken = taken.pop_all()
        self._is_ending = False
        self._last_line = "its log is empty"
        self._log = threading.Thread(target=self._copy_log, daemon=True)
        self._log.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises ReplicaError if the server has ended."""
        status = self._process.poll()
        if status is not None:
            self._log.join(POLL_SECONDS)
            raise ReplicaError(f"headway serve has ended with status {status}: {self._last_line}")

    def wait_until_ready(self, seconds: float) -> None:
        """Raises ReplicaError if the server ends or the time is over."""
        deadline = time.monotonic() + seconds
        while not self._is_ready():
            self.check()
            if time.monotonic() > deadline:
                raise ReplicaError(f"headway serve was not ready after {seconds:g} s; see its log")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(KILL_SECONDS)
                client.connect(self.path)
                client.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return client.recv(64).startswith(b"HTTP/1.1 200 ")
        except OSError:
            return False

    def watch(self, on_end: Callable[[], object]) -> None:
        """Calls on_end, in another thread, if the server ends before `end` is called."""

        def wait() -> None:
            self._process.wait()
            if not self._is_ending:
                on_end()

        threading.Thread(target=wait, daemon=True).start()

    def end(self, drain_seconds: float) -> None:
        """Lets requests finish in that time, then ends the server. May be called twice."""
        self._is_ending = True
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(drain_seconds + KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.join(KILL_SECONDS)
        self._taken.close()

    def _copy_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace")
                sys.stderr.write(text)
                if text.strip():
                    self._last_line = text.strip()


def _environment(flags: Texts) -> dict[str, str]:
    """Returns this process's environment without variables of the given flags, which would take precedence
    over a file."""
    taken = {f"HEADWAY_{flag.upper().replace('-', '_')}" for flag in flags}
    return {name: value for name, value in os.environ.items() if name not in taken}
