"""The arithmetic of a gated activation: the same places of rounding wherever it is computed, in Triton and in
Gluon."""

from __future__ import annotations

from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._triton import gl, gluon_jit_once_for, jit, tl


@jit
def gated_product(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up in their type, the activation rounded before it is multiplied."""
    value = wide(gate)
    decay = tl.exp(-tl.abs(value))
    value *= tl.where(value >= 0, 1.0, decay) / (1 + decay)
    return (wide(value.to(gate.dtype)) * wide(up)).to(gate.dtype)


@gluon_jit_once_for()
def gluon_gated_product(gate: gl.tensor, up: gl.tensor, dtype: gl.constexpr) -> gl.tensor:
    """The same in Gluon, of float32 sums, which are rounded to the type first."""
    value = gate.to(dtype).to(gl.float32)
    decay = gl.exp(-gl.abs(value))
    value *= gl.where(value >= 0, 1.0, decay) / (1 + decay)
    return (value.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
