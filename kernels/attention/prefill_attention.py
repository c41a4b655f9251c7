"""Causal attention of long chunks of queries over the paged KV cache (chunked prefill).

A program computes some queries over all of their keys, in the order of sums of all attention kernels
(_key_tiles.py), so that the division of a prompt into chunks does not change a query's result. The keys and
values of the chunk are in the cache already.
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import check_attention, score_factors
from headway.kernels.attention._hopper_attention import streamed_windows, streams_attention
from headway.kernels.attention._key_tiles import OPTIONS, attend_keys
from headway.kernels.attention.dispatch import (
    GROUP_TILES,
    QUAD_TILES,
    AttentionKernel,
    AttentionShape,
    choose,
    prompt_tile,
)
from headway.kernels.reference.attention.prefill_attention import prefill_attention as prefill_attention_twin
from headway.kernels.runtime._device import shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, jit_once_for, takes_triton, tl
from headway.kernels.types._score_rule import ScoreRule


@jit_once_for(
    "window", "max_blocks", "first_position", "sliding_window", "table_stride", "table_ptr", "start_ptr", "end_ptr"
)  # fmt: skip
def _prefill_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window: tl.tensor,
    max_blocks: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,
    sliding_window: tl.tensor,
    first_position: tl.tensor,
    query_row_stride: tl.tensor,
    query_place_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    out_row_stride: tl.tensor,
    out_place_stride: tl.tensor,
    out_head_stride: tl.tensor,
    GQA_GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ENDS: tl.constexpr,
) -> None:
    """Each program computes one head and QUERIES queries. The last queries, which see most keys, start
    first."""
    head = tl.program_id(0)
    first_place = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    row = tl.program_id(2).to(tl.int64)
    start = tl.load(start_ptr + row).to(tl.int32)
    place = first_place + tl.arange(0, QUERIES)
    is_query = (place < window)[:, None]
    column = tl.arange(0, HEAD_DIM)[None, :]
    q_offset = row * query_row_stride + head * query_head_stride
    q_offsets = q_offset + place[:, None].to(tl.int64) * query_place_stride + column
    q = tl.load(query_ptr + q_offsets, mask=is_query, other=0)
    position = start + place

    limit = max_blocks * BLOCK_SIZE
    end = tl.minimum(start + tl.minimum(window, first_place + QUERIES), limit)
    if HAS_ENDS:
        end = tl.minimum(end, tl.load(end_ptr + row).to(tl.int32))
    keys_ptr = key_ptr + (head // GQA_GROUP_SIZE) * head_stride
    values_ptr = value_ptr + (head // GQA_GROUP_SIZE) * head_stride
    entries_ptr = table_ptr + row * table_stride
    result = attend_keys(
        q, position, keys_ptr, values_ptr, entries_ptr, end, first_position, (scale, slope, sliding_window),
        block_stride, token_stride, QUERIES, HEAD_DIM, BLOCK_SIZE, TILE, QUAD, GROUP,
    )  # fmt: skip
    out_offset = row * out_row_stride + head * out_head_stride
    out_offsets = out_offset + place[:, None].to(tl.int64) * out_place_stride + column
    tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)


def prefill_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    rule: ScoreRule,
    *,
    end_positions: torch.Tensor | None = None,  # [rows] int64
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `paged_attention` returns, [rows, window, q_heads, head_dim], for windows of any width."""
    if not takes_triton(query) or query.dtype == torch.float64:
        return prefill_attention_twin(
            query, key_cache, value_cache, block_table, start_positions, rule,
            end_positions=end_positions, out=out,
        )  # fmt: skip
    result = torch.empty_like(query) if out is None else out
    check_attention(query, key_cache, value_cache, result)
    rows, window, q_heads, head_dim = query.shape
    if rows == 0 or window == 0:
        return result
    gqa_group_size = q_heads // key_cache.shape[2]
    can_copy = _are_flat(query, result) and streams_attention(query, key_cache, value_cache, rule)
    # 0 cached keys: the caller has decided against split-KV.
    kernel = choose(
        AttentionShape(window, gqa_group_size, 0, can_copy=can_copy, has_ends=end_positions is not None)
    )
    if kernel is AttentionKernel.PREFILL_TMA:
        streamed_windows(query, key_cache, value_cache, block_table, start_positions, rule, result)
        return result
    cut = prompt_tile(1, head_dim, query.element_size(), shared_memory_bytes(query.device))
    _prefill_kernel[(q_heads, blocks_of(window, cut.queries), rows)](
        query, key_cache, value_cache, block_table, start_positions,
        start_positions if end_positions is None else end_positions, result,
        window, block_table.shape[1], *score_factors(rule), rule.first_position,
        *query.stride()[:3], *key_cache.stride()[:3], block_table.stride(0), *result.stride()[:3],
        GQA_GROUP_SIZE=gqa_group_size, HEAD_DIM=head_dim, BLOCK_SIZE=key_cache.shape[1],
        QUERIES=cut.queries, TILE=cut.keys, QUAD=QUAD_TILES * cut.keys, GROUP=GROUP_TILES * cut.keys,
        HAS_ENDS=end_positions is not None, num_warps=cut.num_warps, num_stages=cut.num_stages, **OPTIONS,
    )  # fmt: skip
    return result


def _are_flat(*tensors: torch.Tensor) -> bool:
    """Returns whether the rows of each, [rows, window, heads, head_dim], follow one another without gaps."""
    rows, window = tensors[0].shape[:2]
    return rows == 1 or all(tensor.stride(0) == window * tensor.stride(1) for tensor in tensors)
