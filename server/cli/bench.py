"""`headway bench`: each benchmark is a process of its own.

The engine's imports torch, which this process never does; the client's shares no event loop with anybody.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

COMMANDS = {
    "engine": (sys.executable, "-P", "-m", "headway.engine.bench"),
    "shape": (sys.executable, "-P", "-m", "headway.engine.bench.shape"),
    "serve": (sys.executable, "-P", "-m", "headway.server.bench"),
}


def bench(kind: str, arguments: Sequence[str]) -> int:
    """Returns the benchmark's exit status."""
    return subprocess.run([*COMMANDS[kind], *arguments], check=False).returncode
