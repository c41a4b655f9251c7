"""Causal attention of consecutive chunks of different lengths over the paged KV cache.

The number of chunks and their lengths are data, so that one captured graph serves any chunks that fit. The
order of sums is that of all attention kernels (_key_tiles.py). The keys and values of the chunks are in the
cache already.
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import check_attention, score_factors
from headway.kernels.attention._hopper_attention import streamed_attention, streams_attention
from headway.kernels.attention._key_tiles import OPTIONS, attend_keys
from headway.kernels.attention.dispatch import (
    GROUP_TILES,
    QUAD_TILES,
    AttentionKernel,
    AttentionShape,
    choose,
    prompt_tile,
)
from headway.kernels.reference.attention.varlen_attention import varlen_attention as varlen_attention_twin
from headway.kernels.runtime._device import shared_memory_bytes
from headway.kernels.runtime._triton import check_dense, jit_once_for, power_of_two, takes_triton, tl
from headway.kernels.types._score_rule import ScoreRule

# This number of chunks may end within a tile before a program has to compute two tiles.
_SHORT_CHUNKS = 4


@jit_once_for("num_chunks", "max_blocks", "first_position", "sliding_window", "table_stride")
def _varlen_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    start_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_chunks: tl.tensor,
    max_blocks: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,
    sliding_window: tl.tensor,
    first_position: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    GQA_GROUP_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Each program computes PACKED heads of a GQA group and QUERIES queries of a chunk, or several such tiles
    if there are many short chunks. The last queries, which see most keys, start first."""
    first_head = tl.program_id(0) * PACKED
    row = tl.arange(0, QUERIES * PACKED)  # the heads of a query are adjacent
    head = first_head + row % PACKED
    chunks = tl.arange(0, CHUNKS)
    lengths = tl.load(length_ptr + chunks, mask=chunks < num_chunks, other=0).to(tl.int32)
    tiles = (lengths + QUERIES - 1) // QUERIES
    tiles_through = tl.cumsum(tiles, 0)
    num_tiles = tl.sum(tiles, 0)
    for index in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        tile = num_tiles - 1 - index
        chunk = tl.sum((tiles_through <= tile).to(tl.int32), 0)
        first_place = (tile - tl.sum(tl.where(chunks == chunk, tiles_through - tiles, 0), 0)) * QUERIES
        length = tl.load(length_ptr + chunk).to(tl.int32)
        start = tl.load(start_ptr + chunk).to(tl.int32)
        place = first_place + row // PACKED
        is_query = (place < length)[:, None]
        token = tl.load(first_ptr + chunk) + place
        column = tl.arange(0, HEAD_DIM)[None, :]
        q_offsets = (token * query_token_stride + head * query_head_stride)[:, None] + column
        q = tl.load(query_ptr + q_offsets, mask=is_query, other=0)
        position = start + place

        end = tl.minimum(start + tl.minimum(length, first_place + QUERIES), max_blocks * BLOCK_SIZE)
        keys_ptr = key_ptr + (first_head // GQA_GROUP_SIZE) * head_stride
        values_ptr = value_ptr + (first_head // GQA_GROUP_SIZE) * head_stride
        entries_ptr = table_ptr + chunk.to(tl.int64) * table_stride
        result = attend_keys(
            q, position, keys_ptr, values_ptr, entries_ptr, end, first_position, (scale, slope, sliding_window),
            block_stride, token_stride, QUERIES * PACKED, HEAD_DIM, BLOCK_SIZE, TILE, QUAD, GROUP,
        )  # fmt: skip
        out_offsets = (token * out_token_stride + head * out_head_stride)[:, None] + column
        tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=is_query)


def varlen_attention(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [chunks, max_blocks] int32 or int64; entries not in use may be -1
    first_tokens: torch.Tensor,  # [chunks] int64
    lengths: torch.Tensor,  # [chunks] int64; 0: no chunk
    start_positions: torch.Tensor,  # [chunks] int64
    rule: ScoreRule,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [tokens, q_heads, head_dim]: the token first + w of a chunk, w < length, attends to the keys up
    to position start + w that the rule makes visible. The results of tokens of no chunk are not written."""
    if not takes_triton(query) or query.dtype == torch.float64:
        return varlen_attention_twin(
            query, key_cache, value_cache, block_table, first_tokens, lengths, start_positions, rule,
            out=out,
        )  # fmt: skip
    result = torch.empty_like(query) if out is None else out
    check_attention(query[None], key_cache, value_cache, result[None])
    check_dense(first_tokens, lengths, start_positions)
    num_tokens, q_heads, head_dim = query.shape
    num_chunks, max_blocks = block_table.shape
    gqa_group_size = q_heads // key_cache.shape[2]
    if num_tokens == 0 or num_chunks == 0:
        return result
    can_copy = streams_attention(query, key_cache, value_cache, rule)
    kernel = choose(AttentionShape(None, gqa_group_size, can_copy=can_copy))
    if kernel is AttentionKernel.VARLEN_TMA:
        streamed_attention(
            query, key_cache, value_cache, block_table, first_tokens, lengths, start_positions, rule, result,
        )  # fmt: skip
    else:
        cut = prompt_tile(gqa_group_size, head_dim, query.element_size(), shared_memory_bytes(query.device))
        grid = q_heads // cut.heads, num_tokens // cut.queries + min(num_chunks, _SHORT_CHUNKS)
        _varlen_kernel[grid](
            query, key_cache, value_cache, block_table, first_tokens, lengths, start_positions, result,
            num_chunks, max_blocks, *score_factors(rule), rule.first_position, *query.stride()[:2], *key_cache.stride()[:3],
            block_table.stride(0), *result.stride()[:2], GQA_GROUP_SIZE=gqa_group_size, PACKED=cut.heads, HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[1], CHUNKS=power_of_two(num_chunks), QUERIES=cut.queries,
            TILE=cut.keys, QUAD=QUAD_TILES * cut.keys, GROUP=GROUP_TILES * cut.keys,
            num_warps=cut.num_warps, num_stages=cut.num_stages, **OPTIONS,
        )  # fmt: skip
    return result
