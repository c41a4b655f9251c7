"""Keeps lines from stderr that C++ code writes there, past Python's warnings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = 2


@contextmanager
def without_stderr() -> Iterator[None]:
    """Discards what this process writes to stderr meanwhile, such as PyTorch's line that the choice of a BLAS
    library is experimental. Does nothing where stderr is closed."""
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
