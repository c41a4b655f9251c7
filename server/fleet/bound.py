"""Turns into another program that ends with its parent: python -m headway.server.fleet.bound PID PROGRAM ...

PID is the parent's. An actor of Ray that is killed runs no more code, so that the kernel has to send SIGTERM
to its child (on Linux).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); it outlives execve(2)


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        sys.exit("headway: the process that started this server has ended")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
