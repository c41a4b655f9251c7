"""Multiplies results by the sigmoid of their gates."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.sigmoid_mul import sigmoid_mul as sigmoid_mul_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl


@jit
def _sigmoid_mul_kernel(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    heads: tl.tensor,
    dim: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes a head of a token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    is_inside = column < dim
    own_ptr = x_ptr + (token * heads + head) * dim + column
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_ptr + token * token_stride + head * head_stride + column, mask=is_inside, other=0.0)
    x = tl.load(own_ptr, mask=is_inside, other=0.0)
    factor = (1 / (1 + tl.exp(-wide(gate)))).to(x.dtype)
    tl.store(own_ptr, (wide(x) * wide(factor)).to(x.dtype), mask=is_inside)


def sigmoid_mul(
    x: torch.Tensor,  # [tokens, heads, dim], in place
    gate: torch.Tensor,  # [tokens, heads, dim]
) -> None:
    """Multiplies x by sigmoid(gate), which is computed in float32 (float64 for float64) and then rounded."""
    if not takes_triton(x):
        sigmoid_mul_twin(x, gate)
        return
    check_dense(x)
    assert gate.stride(2) == 1, gate.stride()
    tokens, heads, dim = x.shape
    if tokens > 0:
        overlaps, launch = overlap(x.device)
        _sigmoid_mul_kernel[(tokens, heads)](
            x, gate, heads, dim, *gate.stride()[:2], BLOCK=power_of_two(dim), OVERLAPS=overlaps, **launch
        )
