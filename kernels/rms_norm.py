"""Root-mean-square norm, alone or after a residual addition."""

from __future__ import annotations

import torch

from headway.kernels._device import overlap
from headway.kernels._triton import jit, power_of_two, takes_triton, tl
from headway.kernels._wide import wide
from headway.kernels.reference.rms_norm import add_rms_norm as add_rms_norm_twin
from headway.kernels.reference.rms_norm import rms_norm as rms_norm_twin


@jit
def _norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    EPSILON: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program a token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_inside = column < hidden
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    weight = wide(tl.load(weight_ptr + column, mask=is_inside, other=0.0))
    x = tl.load(x_ptr + token * x_stride + column, mask=is_inside, other=0.0)
    value = wide(x)
    if HAS_RESIDUAL:
        place_ptr = residual_ptr + token * residual_stride + column
        total = value + wide(tl.load(place_ptr, mask=is_inside, other=0.0))
        tl.store(place_ptr, total.to(x.dtype), mask=is_inside)
        value = wide(total.to(x.dtype))
    value *= tl.rsqrt(tl.sum(value * value, 0) / hidden + EPSILON)
    if UNIT_OFFSET:
        value *= 1 + weight
    else:
        value = wide(value.to(x.dtype)) * weight
    tl.store(out_ptr + token * hidden + column, value.to(x.dtype), mask=is_inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    has_residual: bool,
    unit_offset: bool,
) -> torch.Tensor:
    tokens, hidden = x.shape
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1, (x.stride(), residual.stride())
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    block = power_of_two(hidden)
    if tokens > 0:
        overlaps, launch = overlap(x.device)
        _norm_kernel[(tokens,)](
            x, residual, weight, out, hidden, x.stride(0), residual.stride(0),
            EPSILON=epsilon, HAS_RESIDUAL=has_residual, UNIT_OFFSET=unit_offset, BLOCK=block,
            OVERLAPS=overlaps, num_warps=min(max(block // 512, 1), 16), **launch,
        )  # fmt: skip
    return out


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden], dtype of x."""
    if takes_triton(x):
        return _launch(x, x, weight, epsilon, has_residual=False, unit_offset=unit_offset)
    return rms_norm_twin(x, weight, epsilon, unit_offset=unit_offset)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    residual: torch.Tensor,  # [tokens, hidden] float, in place: += x
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden]: the norm of the new residual."""
    if takes_triton(x):
        return _launch(x, residual, weight, epsilon, has_residual=True, unit_offset=unit_offset)
    return add_rms_norm_twin(x, residual, weight, epsilon, unit_offset=unit_offset)
