"""Rotary position embedding, half-split: dimension i turns with dimension i + head_dim / 2."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.rope import rope as rope_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl


@jit
def _rope_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    position_ptr: tl.tensor,
    table_ptr: tl.tensor,
    half: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program turns the query heads of a token, another its key heads."""
    token = tl.program_id(0).to(tl.int64)
    column, head = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn_ptr = table_ptr + tl.load(position_ptr + token) * 2 * half + column
    cos = tl.load(turn_ptr, mask=column < half, other=0.0)
    sin = tl.load(turn_ptr + half, mask=column < half, other=0.0)
    if tl.program_id(1) == 0:
        first_ptr = query_ptr + token * q_token_stride + head * q_head_stride + column
        _turn(first_ptr, half, cos, sin, (head < q_heads) & (column < half))
    else:
        first_ptr = key_ptr + token * k_token_stride + head * k_head_stride + column
        _turn(first_ptr, half, cos, sin, (head < kv_heads) & (column < half))


@jit
def _turn(first_ptr: tl.tensor, half: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor) -> None:
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + half, mask=mask, other=0.0)
    tl.store(first_ptr, (wide(first) * cos - wide(second) * sin).to(first.dtype), mask=mask)
    tl.store(first_ptr + half, (wide(second) * cos + wide(first) * sin).to(first.dtype), mask=mask)


def rope(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32 or float64: cosines, then sines
) -> None:
    """Computed in the table's dtype, rounded once."""
    if takes_triton(query):
        check_dense(positions, cos_sin)
        tokens, q_heads, head_dim = query.shape
        kv_heads, half = key.shape[1], head_dim // 2
        assert query.stride(2) == key.stride(2) == 1, (query.stride(), key.stride())
        if tokens > 0:
            overlaps, launch = overlap(query.device)
            _rope_kernel[(tokens, 2)](
                query, key, positions, cos_sin, half, q_heads, kv_heads, *query.stride()[:2], *key.stride()[:2],
                HEADS=power_of_two(max(q_heads, kv_heads)), HALF=power_of_two(half),
                OVERLAPS=overlaps, **launch,
            )  # fmt: skip
        return
    rope_twin(query, key, positions, cos_sin)
