"""Causal attention of long chunks of queries over the paged cache.

Keys are taken in tiles cut at fixed positions, in order: how a prompt is divided into chunks does not change
a query's result. Knows blocks and positions; the keys and values of the chunk are in the cache already.
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import LOG2_E, check_attention
from headway.kernels.attention._hopper_attention import streamed_windows, streams_attention
from headway.kernels.attention.dispatch import AttentionKernel, AttentionShape, choose, prefill_tile
from headway.kernels.reference.attention.prefill_attention import prefill_attention as prefill_attention_twin
from headway.kernels.runtime._device import shared_memory_bytes
from headway.kernels.runtime._triton import blocks_of, jit, jit_once_for, takes_triton, tl


@jit
def _attend_tile(
    q: tl.tensor,  # [queries, head_dim]
    position: tl.tensor,  # [queries] int32
    m_i: tl.tensor,  # [queries] float32: highest score so far
    l_i: tl.tensor,  # [queries] float32: sum of 2 ** (score - m_i)
    acc: tl.tensor,  # [queries, head_dim] float32: values weighted likewise
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds keys first .. first + TILE; IS_WHOLE: every query sees all of them."""
    token = first + tl.arange(0, TILE)
    exists = token < end
    if BLOCK_SIZE >= TILE:
        block = tl.load(table_ptr + first // BLOCK_SIZE)
        place = first % BLOCK_SIZE + tl.arange(0, TILE)
    elif IS_WHOLE:
        block = tl.load(table_ptr + token // BLOCK_SIZE)
        place = token % BLOCK_SIZE
    else:
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=exists, other=0)
        place = token % BLOCK_SIZE
    cell = tl.maximum(block, 0).to(tl.int64) * block_stride + place * token_stride
    cells = cell[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    if IS_WHOLE:
        k = tl.load(key_ptr + cells)
        v = tl.load(value_ptr + cells)
    else:
        k = tl.load(key_ptr + cells, mask=exists[:, None], other=0)
        v = tl.load(value_ptr + cells, mask=exists[:, None], other=0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if not IS_WHOLE:
        is_visible = exists[None, :] & (token[None, :] <= position[:, None])
        scores = tl.where(is_visible, scores, -float("inf"))
    if SKIPS_FIRST:
        scores = tl.where((token >= first_position)[None, :], scores, -float("inf"))
    highest = tl.maximum(m_i, tl.max(scores, 1) * scale)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(m_i - base)
    l_i = l_i * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return highest, l_i, acc


@jit
def _attend_keys(
    q: tl.tensor,  # [queries, head_dim]
    position: tl.tensor,  # [queries] int32
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    whole_end: tl.tensor,
    end: tl.tensor,
    first_position: tl.tensor,
    scale: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
) -> tl.tensor:
    """[queries, head_dim] float32: over keys 0 .. end, of which every query sees those before whole_end."""
    m_i = tl.full((QUERIES,), -float("inf"), tl.float32)
    l_i = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    for first in range(0, whole_end, TILE):
        m_i, l_i, acc = _attend_tile(
            q, position, m_i, l_i, acc, key_ptr, value_ptr, table_ptr, first, end, first_position, scale,
            block_stride, token_stride, HEAD_DIM, BLOCK_SIZE, TILE, True, SKIPS_FIRST,
        )  # fmt: skip
    for first in range(whole_end, end, TILE):
        m_i, l_i, acc = _attend_tile(
            q, position, m_i, l_i, acc, key_ptr, value_ptr, table_ptr, first, end, first_position, scale,
            block_stride, token_stride, HEAD_DIM, BLOCK_SIZE, TILE, False, SKIPS_FIRST,
        )  # fmt: skip
    return acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]


@jit_once_for("window", "max_blocks", "first_position", "table_stride", "table_ptr", "start_ptr", "end_ptr")
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
    SKIPS_FIRST: tl.constexpr,
    HAS_ENDS: tl.constexpr,
) -> None:
    """One program a head and QUERIES queries; the last queries, which see most keys, start first."""
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
    whole_end = tl.maximum(tl.minimum(start + first_place + 1, end), 0) // TILE * TILE
    keys_ptr = key_ptr + (head // GQA_GROUP_SIZE) * head_stride
    values_ptr = value_ptr + (head // GQA_GROUP_SIZE) * head_stride
    entries_ptr = table_ptr + row * table_stride
    result = _attend_keys(
        q, position, keys_ptr, values_ptr, entries_ptr, whole_end, end, first_position, scale,
        block_stride, token_stride, QUERIES, HEAD_DIM, BLOCK_SIZE, TILE, SKIPS_FIRST,
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
    scale: float,
    *,
    first_position: int = 0,
    end_positions: torch.Tensor | None = None,  # [rows] int64
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window, q_heads, head_dim]: query w of a row sees keys first_position .. start + w.

    A query that sees no key gets zeros. From its row's end position on there are no keys: what memory holds
    there changes no query before it.
    """
    if not takes_triton(query) or query.dtype == torch.float64:
        return prefill_attention_twin(
            query,
            key_cache,
            value_cache,
            block_table,
            start_positions,
            scale,
            first_position=first_position,
            end_positions=end_positions,
            out=out,
        )
    result = torch.empty_like(query) if out is None else out
    check_attention(query, key_cache, value_cache, result)
    rows, window, q_heads, head_dim = query.shape
    if rows == 0 or window == 0:
        return result
    gqa_group_size = q_heads // key_cache.shape[2]
    can_copy = _are_flat(query, result) and streams_attention(query, key_cache, value_cache)
    sees_all = first_position == 0 and end_positions is None
    # The number of cached keys decided before: here they are taken in order.
    kernel = choose(AttentionShape(window, gqa_group_size, 0, head_dim, can_copy=can_copy, sees_all=sees_all))
    if kernel is AttentionKernel.PREFILL_TMA:
        streamed_windows(query, key_cache, value_cache, block_table, start_positions, scale, result)
        return result
    tile = prefill_tile(head_dim, query.element_size(), shared_memory_bytes(query.device))
    _prefill_kernel[(q_heads, blocks_of(window, tile.queries), rows)](
        query, key_cache, value_cache, block_table, start_positions,
        start_positions if end_positions is None else end_positions, result,
        window, block_table.shape[1], scale * LOG2_E, first_position,
        *query.stride()[:3], *key_cache.stride()[:3], block_table.stride(0), *result.stride()[:3],
        GQA_GROUP_SIZE=gqa_group_size, HEAD_DIM=head_dim, BLOCK_SIZE=key_cache.shape[1],
        QUERIES=tile.queries, TILE=tile.keys, SKIPS_FIRST=first_position > 0, HAS_ENDS=end_positions is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return result


def _are_flat(*tensors: torch.Tensor) -> bool:
    """Returns whether the rows of each, [rows, window, heads, head_dim], follow one another without gaps."""
    rows, window = tensors[0].shape[:2]
    return rows == 1 or all(tensor.stride(0) == window * tensor.stride(1) for tensor in tensors)
