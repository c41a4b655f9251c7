"""The dtype in which kernels calculate."""

from __future__ import annotations

from headway.kernels.runtime._triton import jit, tl


@jit
def wide(value: tl.tensor) -> tl.tensor:
    """Returns the value in float32, or unchanged if it has float64."""
    return value if value.dtype == tl.float64 else value.to(tl.float32)
