"""Causal attention of chunks over the paged KV cache on Hopper, warp-specialised: one warp of a program
copies keys and values by TMA. Two warpgroups, each with its own queries, overlap the softmax of a tile with
the products of another.

Written in Gluon, which nothing interprets, after FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). The
order of sums is that of all attention kernels (_key_tiles.py).
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import score_factors
from headway.kernels.attention._hopper_attention_kernel import _OPTIONS, _streamed_attention_kernel
from headway.kernels.attention.dispatch import GROUP_TILES, QUAD_TILES, packed_heads, split_kv_tile
from headway.kernels.linear._hopper_core import has_bulk_copies
from headway.kernels.runtime._device import multiprocessors
from headway.kernels.runtime._triton import TensorDescriptor, blocks_of, gl, power_of_two
from headway.kernels.types._score_rule import ScoreRule

# Query rows of a program: queries times heads. Each warpgroup computes half of them.
ROWS = 128
_STAGES = 2
_TYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
# Columns of 16-bit numbers that are adjacent in shared memory.
_PIECE = 64
# Registers per thread of the second warpgroup and of the copying warpgroup, in which only one warp works. The
# first warpgroup gets the rest, which is as much as the second has.
_REGISTERS = 240, 24


def streams_attention(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rule: ScoreRule
) -> bool:
    """Returns whether these kernels support the query: its device, dtype and head size, whether TMA can copy
    the caches, and whether the first visible key is in the first tile."""
    if not has_bulk_copies(query) or rule.first_position >= split_kv_tile(
        query.shape[-1], query.element_size()
    ):
        return False
    block_size = key_cache.shape[1]
    has_shape = query.shape[-1] in _HEAD_DIMS and block_size >= 8 and block_size & (block_size - 1) == 0
    return (
        has_shape
        and query.dtype in _TYPES
        and all(
            cache.dtype == query.dtype
            and cache.data_ptr() % 16 == 0
            and all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
            for cache in (key_cache, value_cache)
        )
    )


def streamed_attention(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [chunks, max_blocks] int32 or int64; entries not in use may be -1
    first_tokens: torch.Tensor,  # [chunks] int64
    lengths: torch.Tensor,  # [chunks] int64; 0: no chunk
    start_positions: torch.Tensor,  # [chunks] int64
    rule: ScoreRule,
    out: torch.Tensor,  # [tokens, q_heads, head_dim], written
) -> None:
    """Computes attention for chunks whose lengths only the device knows."""
    num_chunks = len(block_table)
    _launch(
        query, (key_cache, value_cache, block_table), (first_tokens, lengths, start_positions), rule, out,
        most_tiles=len(query) // _queries_of(query, key_cache) + num_chunks, most_chunks=power_of_two(num_chunks),
    )  # fmt: skip


def streamed_windows(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim], rows without gaps between them
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    rule: ScoreRule,
    out: torch.Tensor,  # [rows, window, q_heads, head_dim], likewise, written
) -> None:
    """Computes attention for chunks of one length. A query that sees no key gets zeros."""
    rows, window = query.shape[:2]
    _launch(
        query.flatten(0, 1), (key_cache, value_cache, block_table), (start_positions,) * 3, rule, out.flatten(0, 1),
        most_tiles=rows * blocks_of(window, _queries_of(query[0], key_cache)), window=window,
    )  # fmt: skip


def _queries_of(query: torch.Tensor, key_cache: torch.Tensor) -> int:
    """Returns the number of queries of a program."""
    return ROWS // packed_heads(query.shape[1] // key_cache.shape[2])


def _launch(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    paged: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # keys, values, block table
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # first tokens, lengths, start positions
    rule: ScoreRule,
    out: torch.Tensor,  # [tokens, q_heads, head_dim], written
    *,
    most_tiles: int,
    window: int = 0,
    most_chunks: int = 0,
) -> None:
    """Launches the kernel. most_tiles: an upper bound of the tiles of queries. window: the length of every
    chunk; first tokens and lengths are not read then. most_chunks: without a window, a power of two that is
    not below their number."""
    key_cache, value_cache, block_table = paged
    q_heads, head_dim = query.shape[1:]
    num_chunks, max_blocks = block_table.shape
    block_size = key_cache.shape[1]
    gqa_group_size = q_heads // key_cache.shape[2]
    packed = packed_heads(gqa_group_size)
    heads = q_heads // packed
    tile = split_kv_tile(head_dim, query.element_size())
    box = [1, min(block_size, tile), 1, _PIECE]
    layout = gl.NVMMASharedLayout(128, 16, rank=len(box))
    descriptors = (
        TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, layout)
        for cache in (key_cache, value_cache)
    )
    num_programs = min(heads * most_tiles, multiprocessors(query.device))
    is_wide = head_dim > _PIECE * 2
    is_long = max_blocks * block_size > (QUAD_TILES if is_wide else GROUP_TILES) * tile
    num_sums = num_programs * ROWS * head_dim * (1 + is_wide)
    stored_sums = torch.empty(num_sums if is_long else 1, dtype=torch.float32, device=query.device)
    _streamed_attention_kernel[(num_programs,)](
        *descriptors, query, block_table, *chunks, stored_sums, out, num_chunks, window, max_blocks, rule.first_position,
        *score_factors(rule), *query.stride()[:2], block_table.stride(0), *out.stride()[:2],
        HEADS=heads, GQA_GROUP_SIZE=gqa_group_size, PACKED=packed, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        CHUNKS=most_chunks, QUERIES=ROWS // packed, TILE=tile, QUAD=QUAD_TILES, GROUP=GROUP_TILES, PIECE=_PIECE, STAGES=_STAGES,
        REGISTERS=_REGISTERS, num_warps=4, **_OPTIONS,
    )  # fmt: skip
