"""An RMSNorm of each head, times the SiLU of a gate."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.gated_rms_norm import gated_rms_norm as gated_rms_norm_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, power_of_two, takes_triton, tl

# With fusion each thread would fuse another product with the sum, and threads would disagree about the sum.
_OPTIONS = {"enable_fp_fusion": False}
_HEADS = 8  # of a program: one head of 128 numbers would not be worth a program


@jit
def _gated_rms_norm_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    EPSILON: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes HEADS heads of a token."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_inside = (head < heads) & (column < dim)
    place = (token * heads + head) * dim + column
    weight = tl.load(weight_ptr + column, mask=column < dim, other=0.0)
    if OVERLAPS:
        # As in rms_norm.py, the next kernel reads only weights before its own wait.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + place, mask=is_inside, other=0.0)
    gate = wide(
        tl.load(gate_ptr + token * token_stride + head * head_stride + column, mask=is_inside, other=0.0)
    )
    normed = wide(x) * tl.rsqrt(tl.sum(wide(x) * wide(x), 1) / dim + EPSILON)[:, None]
    weighted = (wide(weight) * wide(normed.to(x.dtype))).to(x.dtype)
    decay = tl.exp(-tl.abs(gate))
    activated = gate * tl.where(gate >= 0, 1.0, decay) / (1 + decay)
    tl.store(out_ptr + place, (wide(weighted) * activated).to(x.dtype), mask=is_inside)


def gated_rms_norm(
    x: torch.Tensor,  # [tokens, heads, dim]
    gate: torch.Tensor,  # [tokens, heads, dim]
    weight: torch.Tensor,  # [dim]
    epsilon: float,
) -> torch.Tensor:
    """Returns [tokens, heads, dim]. Statistics and gate are in float32 (float64 for float64); the norm is
    rounded before the weight multiplies it, the product before the gate does."""
    if not takes_triton(x):
        return gated_rms_norm_twin(x, gate, weight, epsilon)
    check_dense(x, weight)
    assert gate.stride(2) == 1, gate.stride()
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    if tokens > 0:
        overlaps, launch = overlap(x.device)
        _gated_rms_norm_kernel[(tokens, blocks_of(heads, _HEADS))](
            x, gate, weight, out, heads, dim, *gate.stride()[:2],
            EPSILON=epsilon, HEADS=_HEADS, BLOCK=power_of_two(dim), OVERLAPS=overlaps, **_OPTIONS, **launch,
        )  # fmt: skip
    return out
