"""The engine process as the operating system sees it: its start, its end, and the folder of its socket and
temporary files, which is removed however the process ends.

The process may be started long before its configuration is known: it imports its libraries and then waits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from headway.engine import PARENT_VARIABLE
from headway.server.engine.private_folder import SOCKET, private_folder

ENGINE_COMMAND = (sys.executable, "-P", "-m", "headway.engine.process")
_REAP_SECONDS = 0.2
# Threads that wait for each other at the end of an operation spin only briefly: next to another busy process
# a thread may lose its core for milliseconds, and the others would spin all that time. A setting of the
# user's stays.
_SPINNING = {"GOMP_SPINCOUNT": "1000"}


class EngineChild:
    """A process that connects to `address`. Mutable: its owner closes it."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """Raises OSError."""
        with ExitStack() as taken:
            folder = taken.enter_context(private_folder())
            self.address = f"ipc://{folder / SOCKET}"
            # In a session of its own, so that Ctrl-C in the terminal reaches only the server, which lets
            # requests finish.
            self._process = subprocess.Popen(
                [*command, self.address],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment() | {"TMPDIR": str(folder)},
            )
            taken.callback(self._end)
            self._taken = taken.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Returns the exit status, which is negative for a signal."""
        return await asyncio.to_thread(self._process.wait)

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing once the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the whole process group: no process that the engine started may outlive it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills the process if it has not ended, and removes the folder. May be called twice."""
        self._taken.close()

    def _end(self) -> None:
        self.kill()
        with suppress(subprocess.TimeoutExpired):  # a device may be slow to release its memory
            self._process.wait(_REAP_SECONDS)


def _environment() -> dict[str, str]:
    is_decided = "OMP_WAIT_POLICY" in os.environ
    return {**({} if is_decided else _SPINNING), **os.environ, PARENT_VARIABLE: str(os.getpid())}
