"""`headway bench`, `headway quantize` and `headway head`: each runs in a process of its own.

The engine's commands import torch, which this process never does; the client's event loop is shared with
nobody.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

INTERRUPT_SECONDS = 2.0
COMMANDS = {
    "engine": (sys.executable, "-P", "-m", "headway.engine.bench"),
    "exact": (sys.executable, "-P", "-m", "headway.engine.bench.exact"),
    "shape": (sys.executable, "-P", "-m", "headway.engine.bench.shape"),
    "quality": (sys.executable, "-P", "-m", "headway.engine.bench.quality"),
    "serve": (sys.executable, "-P", "-m", "headway.server.bench"),
}
# Commands whose options all belong to the engine.
OF_THE_ENGINE = {
    "quantize": (sys.executable, "-P", "-m", "headway.engine.quantize"),
    "head": (sys.executable, "-P", "-m", "headway.engine.training"),
}


def run(command: Sequence[str], arguments: Sequence[str]) -> int:
    """Returns the command's exit status. Raises KeyboardInterrupt when the command has ended, too."""
    process = subprocess.Popen([*command, *arguments])
    try:
        return process.wait()
    except KeyboardInterrupt:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command after Ctrl-C. A terminal's Ctrl-C has reached the command as well, which then needs
    a moment; another sender's has not."""
    try:
        process.wait(INTERRUPT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
