"""Discards lines that C++ code writes to stderr, which Python's warning filters do not see."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = 2


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discards everything that this process writes to stderr within the context, such as PyTorch's line that
    the choice of a BLAS library is experimental. Does nothing if stderr is closed."""
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    kept, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)
