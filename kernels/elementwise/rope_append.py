"""Rotary position embedding of queries and keys, and the keys and values to the paged cache, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.rope_append import rope_append as rope_append_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, jit, power_of_two, takes_triton, tl


@jit
def _rope_append_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    position_ptr: tl.tensor,
    table_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    half: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    kv_token_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Of a token one program turns the query heads, another the key heads, a third copies the values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column, head = tl.arange(0, HALF)[None, :], tl.arange(0, HEADS)[:, None]
    is_inside = column < half
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn_ptr = table_ptr + tl.load(position_ptr + token) * 2 * half + column
    cos = tl.load(turn_ptr, mask=is_inside, other=0.0)
    sin = tl.load(turn_ptr + half, mask=is_inside, other=0.0)
    if part == 0:
        first_ptr = query_ptr + token * q_token_stride + head * q_head_stride + column
        _turn(first_ptr, half, cos, sin, (head < q_heads) & is_inside)
    else:
        slot = tl.load(slot_ptr + token)
        is_here = (head < kv_heads) & is_inside
        mask = is_here & (slot >= 0)
        from_offset = token * kv_token_stride + head * kv_head_stride + column
        to_offset = (slot * kv_heads + head) * 2 * half + column
        if part == 1:
            first, second = _turn(key_ptr + from_offset, half, cos, sin, is_here)
            tl.store(key_cache_ptr + to_offset, first, mask=mask)
            tl.store(key_cache_ptr + to_offset + half, second, mask=mask)
        else:
            first = tl.load(value_ptr + from_offset, mask=mask)
            second = tl.load(value_ptr + from_offset + half, mask=mask)
            tl.store(value_cache_ptr + to_offset, first, mask=mask)
            tl.store(value_cache_ptr + to_offset + half, second, mask=mask)


@jit
def _turn(
    first_ptr: tl.tensor, half: tl.tensor, cos: tl.tensor, sin: tl.tensor, mask: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """In place; returns both halves as they are now."""
    first = tl.load(first_ptr, mask=mask, other=0.0)
    second = tl.load(first_ptr + half, mask=mask, other=0.0)
    turned_first = (wide(first) * cos - wide(second) * sin).to(first.dtype)
    turned_second = (wide(second) * cos + wide(first) * sin).to(first.dtype)
    tl.store(first_ptr, turned_first, mask=mask)
    tl.store(first_ptr + half, turned_second, mask=mask)
    return turned_first, turned_second


def rope_append(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32 or float64: cosines, then sines
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
) -> None:
    """`rope`, then `kv_append`."""
    if not takes_triton(query):
        return rope_append_twin(query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping)
    check_dense(positions, cos_sin, key_cache, value_cache, slot_mapping)
    tokens, q_heads, head_dim = query.shape
    kv_heads, half = key.shape[1], head_dim // 2
    assert query.stride(2) == key.stride(2) == 1, (query.stride(), key.stride())
    assert key.stride() == value.stride(), (key.stride(), value.stride())
    if tokens > 0:
        overlaps, launch = overlap(query.device)
        _rope_append_kernel[(tokens, 3)](
            query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping,
            half, q_heads, kv_heads, *query.stride()[:2], *key.stride()[:2],
            HEADS=power_of_two(max(q_heads, kv_heads)), HALF=power_of_two(half), OVERLAPS=overlaps, **launch,
        )  # fmt: skip
