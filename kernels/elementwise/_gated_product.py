"""The arithmetic of a gated activation in Triton and in Gluon, which rounds at the same points in all
kernels.

"gelu_tanh" is gate / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (gate + 0.044715 * gate ** 3), which is
gate / (1 + exp(-2 u)). If the exponential overflows, the quotient is 0, which is correct.
"""

from __future__ import annotations

from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._triton import gl, gluon_jit_once_for, jit, tl


@jit
def gated_product(gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Returns activation(gate) * up in their dtype. The activation is rounded before it is multiplied."""
    value = wide(gate)
    if ACTIVATION == "gelu_tanh":
        value /= 1 + tl.exp(value * (-1.5957691216057308 - 0.07135481627260025 * value * value))
    else:
        decay = tl.exp(-tl.abs(value))
        value *= tl.where(value >= 0, 1.0, decay) / (1 + decay)
    return (wide(value.to(gate.dtype)) * wide(up)).to(gate.dtype)


@gluon_jit_once_for()
def gluon_gated_product(
    gate: gl.tensor, up: gl.tensor, dtype: gl.constexpr, ACTIVATION: gl.constexpr
) -> gl.tensor:
    """Does the same in Gluon for float32 sums, which are rounded to the dtype first."""
    value = gate.to(dtype).to(gl.float32)
    if ACTIVATION == "gelu_tanh":
        value /= 1 + gl.exp(value * (-1.5957691216057308 - 0.07135481627260025 * value * value))
    else:
        decay = gl.exp(-gl.abs(value))
        value *= gl.where(value >= 0, 1.0, decay) / (1 + decay)
    return (value.to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)).to(dtype)
