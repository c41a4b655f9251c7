"""Asks the operating system about an unresponsive process: whether it is stopped, and whether it uses the
CPU.

The answers come from /proc; where that does not exist, every answer is "unknown".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
STATE, SESSION = 0, 3  # indices of the fields after the name in /proc/PID/stat: proc_pid_stat(5)
TIMES = slice(11, 15)  # user and system time, its own and that of its children that have ended


def is_stopped(pid: int) -> bool:
    """Returns whether the process is stopped by a signal or by a tracer; False if unknown."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return bool(fields) and fields[STATE] in ("T", "t")


def processor_ticks(session: int) -> int | None:
    """Returns the processor time of all processes of a session, in clock ticks, see TICKS_PER_SECOND; None if
    unknown. A compiler that the engine started counts, too.

    The share of a process that ends is lost, so that only changes are meaningful.
    """
    ticks = [sum(map(int, fields[TIMES])) for fields in _stats() if fields[SESSION] == str(session)]
    return sum(ticks) if ticks else None


def _stats() -> Iterator[list[str]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            yield fields


def _stat(path: Path) -> list[str]:
    """Returns the fields after the name, which may itself contain spaces and brackets; an empty list if
    the process is gone."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
