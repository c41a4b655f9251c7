"""Causal attention of windows of queries over the paged cache, with split KV: the launcher of its two kernels.

_split_kv_plan.py says how the work is shared out and why no result depends on that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.attention._checks import LOG2_E, check_attention
from headway.kernels.attention._split_kv_combine import _combine_kernel
from headway.kernels.attention._split_kv_partial import _partial_kernel
from headway.kernels.attention._split_kv_plan import _OPTIONS
from headway.kernels.attention.prefill_attention import prefill_attention
from headway.kernels.reference.attention.paged_attention import paged_attention as paged_attention_twin
from headway.kernels.runtime._device import multiprocessors, overlap
from headway.kernels.runtime._triton import blocks_of, power_of_two, takes_triton

# Wider windows (queries x heads that share keys) have work enough for the kernel of the prefill.
_WINDOW_LIMIT = 128
_QUERIES = 16, 32
# Keys of a tile: large, because a tile's latency counts more than its work; 16-bit heads to 128, wider ones, others.
_TILE, _WIDE_HEAD_TILE, _WIDE_TYPE_TILE = 128, 64, 32
_QUAD, _TILES, _STAGES = 4, 16, 2
_PROGRAMS_PER_MULTIPROCESSOR = 4
# Registers suffice for this number of warps of the first kernel, with heads of 128.
_RESIDENT_WARPS = 8
# For few rows with narrow heads two, which all run at once: only when the last has started may the next kernels begin.
# More rows gain by programs that wait for their turn.
_NARROW_HEAD, _NARROW_ROWS, _PROGRAMS_OF_NARROW_HEADS = 64, 4, 2
# In times of a tile, measured on the H200: of a tile that shares a multiprocessor with others, of the sums of what tiles
# leave, and of what quads leave, for each of the window's first places, and for each further head that one program adds up.
_TILE_TIME, _PLACE_TIME, _QUAD_PLACE_TIME, _FURTHER_HEAD_TIME, _COUNTED_PLACES = 1.0, 0.4, 0.3, 0.5, 4
# Numbers of rows to compile for. A number for each thread of a warp is added up by one instruction: with 16 instead of 32 a
# layer of a model 1,024 wide takes one row 22 us instead of 20.5.
_SCANNED_ROWS = 32, 64, 256, 1024, 4096
# The most programs of the second kernel: it takes heads together, since mostly it finds nothing to sum.
_COMBINE_PROGRAMS = 512
# Groups that it sums at a time, which is part of the rounding, as is the number of warps.
_SUMMED_GROUPS, _COMBINED_BY_A_WARP = 8, 64


def paged_attention(
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
    there changes no query before it. The block table, start and end positions are older than the preceding launch:
    they are read before that has ended.
    """
    if not takes_triton(query) or query.dtype == torch.float64:
        return paged_attention_twin(
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
    if query.shape[1] * (query.shape[2] // key_cache.shape[2]) > _WINDOW_LIMIT:
        return prefill_attention(
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
    if query.shape[0] > 0:
        _attend(
            query,
            key_cache,
            value_cache,
            block_table,
            start_positions,
            scale,
            first_position,
            end_positions,
            result,
        )
    return result


def _tile(query: torch.Tensor) -> int:
    """Part of the result's rounding: it may depend on the model alone."""
    if query.element_size() > 2:
        return _WIDE_TYPE_TILE
    return _WIDE_HEAD_TILE if query.shape[3] > 128 else _TILE


class _Load(NamedTuple):
    """What decides what a program takes, besides the lengths of the rows; the kernels' parameters of the same names."""

    tile_time: float
    sum_time: float
    quad_sum_time: float
    quads_at_once: int  # of a kv head, or a part of its queries, that have programs at a time


def _load(items: int, window: int, num_multiprocessors: int, warps: int, heads_per_program: int) -> _Load:
    """items: of a tile of keys. warps: of a program. heads_per_program: of the second kernel.

    With a multiprocessor for itself a program hides none of its beginnings and ends, and leaves larger results: 16 rows of
    2,044 keys of 28 query and 4 kv heads x 128 take 64 us by the tile, 45 by two quads.
    """
    places = min(window, _COUNTED_PLACES)
    alone = warps * 2 / _RESIDENT_WARPS
    return _Load(
        _TILE_TIME * alone * items / num_multiprocessors,
        _PLACE_TIME * places,
        _QUAD_PLACE_TIME * places * alone + _FURTHER_HEAD_TIME * (heads_per_program - 1),
        max(num_multiprocessors * _RESIDENT_WARPS // (warps * items), 1),
    )


def _most_pieces(rows: int, max_keys: int, tile: int, load: _Load) -> int:
    """By the group; by the tile, where all tiles take less time than a group's _TILES; by the quad, twice as many as run at
    once."""
    groups, quads, tiles = (rows * blocks_of(max_keys, keys * tile) for keys in (_TILES, _QUAD, 1))
    return max(groups, min(quads, 2 * load.quads_at_once), min(tiles, int(_TILES / load.tile_time) + 1))


def _warps(queries: int, head_dim: int) -> int:
    return 8 if queries > _QUERIES[0] or head_dim > 128 else 4


def _heads_per_program(rows: int, window: int, q_heads: int) -> int:
    return min(power_of_two(blocks_of(rows * window * q_heads, _COMBINE_PROGRAMS)), q_heads)


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start_positions: torch.Tensor,
    scale: float,
    first_position: int,
    end_positions: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    check_attention(query, key_cache, value_cache, out)
    rows, window, q_heads, head_dim = query.shape
    block_size, kv_heads = key_cache.shape[1:3]
    max_blocks = block_table.shape[1]
    gqa_group_size = q_heads // kv_heads
    queries = _QUERIES[0] if window * gqa_group_size <= _QUERIES[0] else _QUERIES[1]
    parts = blocks_of(window * gqa_group_size, queries)
    num_multiprocessors = multiprocessors(query.device)
    warps = _warps(queries, head_dim)
    heads_per_program = _heads_per_program(rows, window, q_heads)
    load = _load(kv_heads * parts, window, num_multiprocessors, warps, heads_per_program)
    tile = _tile(query)
    group = _TILES * tile
    most_pieces = _most_pieces(rows, max_blocks * block_size, tile, load)
    num_partials = most_pieces * window * q_heads
    acc = torch.empty(num_partials * head_dim, dtype=torch.float32, device=query.device)
    m, l_sums = torch.empty(2, num_partials, dtype=torch.float32, device=query.device)
    overlaps, launch = overlap(query.device)
    extent = rows, max_blocks
    visible = first_position, window, *load
    shape = {
        "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "ROWS": next(n for n in _SCANNED_ROWS if n >= rows),
        "TILE": tile, "QUAD": _QUAD * tile, "GROUP": group, "HAS_ENDS": end_positions is not None, "OVERLAPS": overlaps,
    }  # fmt: skip
    ends = start_positions if end_positions is None else end_positions
    is_narrow = query.element_size() <= 2 and head_dim <= _NARROW_HEAD and rows <= _NARROW_ROWS
    programs = _PROGRAMS_OF_NARROW_HEADS if is_narrow else _PROGRAMS_PER_MULTIPROCESSOR
    _partial_kernel[(num_multiprocessors * programs,)](
        query, key_cache, value_cache, block_table, start_positions, ends, out, acc, m, l_sums,
        *extent, scale * LOG2_E, *visible, *query.stride()[:3], *key_cache.stride()[:3],
        block_table.stride(0), *out.stride()[:3], GQA_GROUP_SIZE=gqa_group_size, KV_HEADS=kv_heads, QUERIES=queries, PARTS=parts,
        IS_WIDE=key_cache.numel() >= 2**31, **shape, num_warps=warps, num_stages=_STAGES,
        **_OPTIONS, **launch,
    )  # fmt: skip
    _combine_kernel[(rows * window, blocks_of(q_heads, heads_per_program))](
        acc, m, l_sums, start_positions, ends, out, *extent, *visible, heads_per_program, *out.stride()[:3],
        HEADS=q_heads, GROUPS=_SUMMED_GROUPS, **shape, num_warps=blocks_of(head_dim, _COMBINED_BY_A_WARP), **_OPTIONS, **launch,
    )  # fmt: skip
