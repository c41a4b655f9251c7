"""The weighted sum of a token's slots, which rounds at the same points in all kernels."""

from __future__ import annotations

from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._triton import jit, tl


@jit
def weighted_sum(
    x_ptr: tl.tensor,
    share_ptr: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,  # [n]
    is_inside: tl.tensor,  # [n] bool
    x_stride: tl.tensor,
    SLOTS: tl.constexpr,
) -> tl.tensor:
    """Returns [n] in x's dtype: the token's rows times their shares, added slot by slot in float32."""
    total = wide(tl.load(x_ptr + token * SLOTS * x_stride + column, mask=is_inside, other=0.0))
    total *= tl.load(share_ptr + token * SLOTS)
    for slot in tl.static_range(1, SLOTS):
        row = wide(tl.load(x_ptr + (token * SLOTS + slot) * x_stride + column, mask=is_inside, other=0.0))
        total += row * tl.load(share_ptr + token * SLOTS + slot)
    return total.to(x_ptr.dtype.element_ty)
