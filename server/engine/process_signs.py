"""Asks the operating system about an unresponsive engine: whether a process of its session is stopped, and
whether they use the CPU.

The answers come from /proc; where that does not exist, every answer is "unknown".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
STATE, SESSION = 0, 3  # indices of the fields after the name in /proc/PID/stat: proc_pid_stat(5)
TIMES = slice(11, 15)  # user and system time, its own and that of its children that have ended


def has_stopped(session: int) -> bool:
    """Returns whether a process of the session is stopped by a signal or by a tracer; False if unknown."""
    return any(fields[STATE] in ("T", "t") for fields in _stats(session))


def processor_ticks(session: int) -> int | None:
    """Returns the processor time of all processes of a session, in clock ticks, see TICKS_PER_SECOND; None if
    unknown. A compiler that the engine started counts, too.

    The share of a process that ends is lost, so that only changes are meaningful.
    """
    ticks = [sum(map(int, fields[TIMES])) for fields in _stats(session)]
    return sum(ticks) if ticks else None


def _stats(session: int) -> Iterator[list[str]]:
    """Yields for each process of the session the fields after its name, which may itself contain spaces and
    brackets."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # the process is gone
            continue
        if fields and fields[SESSION] == str(session):
            yield fields
