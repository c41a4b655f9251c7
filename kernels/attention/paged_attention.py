"""Causal attention of windows of queries over the paged cache.

A context is cut at fixed positions: tiles of keys, folded in order within quads of _QUAD tiles, quads in order within
groups of _TILES tiles, groups summed in one fixed order. Whether a program takes a tile, a quad or a group depends on the
load, the arithmetic never does: a query's result is the same in any window, beside any rows. The grid does not depend on
lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.kernels.attention._checks import LOG2_E, check_attention
from headway.kernels.attention.prefill_attention import prefill_attention
from headway.kernels.reference.attention.paged_attention import paged_attention as paged_attention_twin
from headway.kernels.runtime._device import multiprocessors, overlap
from headway.kernels.runtime._triton import blocks_of, jit, jit_once_for, power_of_two, takes_triton, tl

# Wider windows (queries x heads that share keys) have work enough for the kernel of the prefill.
_WINDOW_LIMIT = 128
_QUERIES = 16, 32
# Keys of a tile: large, because a tile's latency counts more than its work; 16-bit heads to 128, wider ones, others.
_TILE, _WIDE_HEAD_TILE, _WIDE_TYPE_TILE = 128, 64, 32
_QUAD, _TILES, _STAGES = 4, 16, 2
_PROGRAMS_PER_MULTIPROCESSOR = 4
# As many warps of the first kernel find registers, with heads of 128.
_RESIDENT_WARPS = 8
# Of few rows with narrow heads two, which all run at once: only when the last has started may the kernels behind begin.
# More rows gain by programs that wait for their turn.
_NARROW_HEAD, _NARROW_ROWS, _PROGRAMS_OF_NARROW_HEADS = 64, 4, 2
# In times of a tile, measured on the H200: of a tile that shares a multiprocessor with others, of the sums of what tiles
# leave, and of what quads leave, for each of the window's first places, and for each further head that one program adds up.
_TILE_TIME, _PLACE_TIME, _QUAD_PLACE_TIME, _FURTHER_HEAD_TIME, _COUNTED_PLACES = 1.0, 0.4, 0.3, 0.5, 4
# Where the compiler may fuse products and sums, equal sums round by the piece of code that makes them.
_OPTIONS = {"enable_fp_fusion": False}
# Numbers of rows to compile for. A number for each thread of a warp is added up by one instruction: with 16 instead of 32 a
# layer of a model 1,024 wide takes one row 22 us instead of 20.5.
_SCANNED_ROWS = 32, 64, 256, 1024, 4096
# So many programs of the second kernel at most: it takes heads together, since mostly it finds nothing to sum.
_COMBINE_PROGRAMS = 512
# Groups that it sums at a time, which is part of the rounding, as is the number of warps.
_SUMMED_GROUPS, _COMBINED_BY_A_WARP = 8, 64


@jit
def _fold(
    top: tl.tensor,  # [n] float32: highest score
    total: tl.tensor,  # [n] float32: sum of 2 ** (score - top)
    mixed: tl.tensor,  # [n, head_dim] float32: values weighted likewise
    next_top: tl.tensor,
    next_total: tl.tensor,
    next_mixed: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds a tile's keys to those before it, or a quad's."""
    highest = tl.maximum(top, next_top)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    old = tl.exp2(top - base)
    new = tl.exp2(next_top - base)
    total = tl.fma(total, old, next_total * new)
    mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], mixed.shape), next_mixed * new[:, None])
    return highest, total, mixed


@jit
def _units_of_rows(
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    num_rows: tl.tensor,
    limit: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    quads_at_once: tl.tensor,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    FURTHER_TILE_TIME: tl.constexpr = 0.03,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """(row, start, end of the keys, pieces; keys of a piece: a tile's, a quad's or a group's; pieces that a program takes,
    where it has registers for them).

    By the group a program takes tile after tile, the longest row's last. By the tile all of them are spread over the
    multiprocessors, and what they leave is added up. 12 rows of 4 tiles, 8 kv heads, 132 multiprocessors, 4 places: 4 tiles'
    times by the group; by the tile 12 * 4 * 8 / 132 = 2.9, and 1.6 for the sums. These take FURTHER_TILE_TIME more for each
    tile of the longest row behind its first group, for a program adds up one query's. By the quad it is done after 4 tiles'
    times and fewer sums, or after 8, where more quads are there than run at once, and no more than twice as many; then by
    two quads, unless rows with an odd number make those too many.
    """
    row = tl.arange(0, ROWS)
    # Read before the kernel in front has ended: older than the last one that waits before it lets others start, but perhaps
    # only in the L2 cache.
    start = tl.load(start_ptr + row, mask=row < num_rows, other=0, cache_modifier=".cg").to(tl.int32)
    end = tl.where(row < num_rows, tl.minimum(start + window, limit), 0)
    if HAS_ENDS:
        given_end = tl.load(end_ptr + row, mask=row < num_rows, other=0, cache_modifier=".cg")
        end = tl.minimum(end, given_end.to(tl.int32))
    end = tl.where(end > first_position, end, 0)
    tiles = (end + TILE - 1) // TILE
    longest = tl.max(tiles, 0)
    quads = (end + QUAD - 1) // QUAD
    num_quads = tl.sum(quads, 0)
    turns = tl.where(num_quads > quads_at_once, 2, 1)
    at_once = tl.where(tl.sum((quads + 1) // 2, 0) > quads_at_once, 1, turns)
    group_time = tl.minimum(longest, GROUP // TILE)
    quad_time = tl.minimum(longest, QUAD // TILE * turns) + quad_sum_time
    quad_time = tl.where(num_quads > 2 * quads_at_once, float("inf"), quad_time)
    tile_time = tl.sum(tiles, 0) * tile_time + sum_time + FURTHER_TILE_TIME * (longest - group_time)
    by_quad = quad_time < group_time
    by_tile = tile_time < tl.minimum(quad_time, group_time)
    pieces = tl.where(by_tile, tiles, tl.where(by_quad, quads, (end + GROUP - 1) // GROUP))
    keys = tl.where(by_tile, TILE, tl.where(by_quad, QUAD, GROUP))
    return row, start, end, pieces, keys, tl.where(keys == QUAD, at_once, 1)


@jit
def _entries(
    entries_ptr: tl.tensor,
    token: tl.tensor,
    first_position: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
) -> tl.tensor:
    """Blocks of the tokens from first_position on and before the end, -1 elsewhere."""
    is_wanted = (token >= first_position) & (token < end)
    return tl.load(entries_ptr + token // BLOCK_SIZE, mask=is_wanted, other=-1, cache_modifier=CACHE)


@jit
def _add_four(
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    d: tl.tensor,
    other_a: tl.tensor,
    other_b: tl.tensor,
    other_c: tl.tensor,
    other_d: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    return a + other_a, b + other_b, c + other_c, d + other_d


@jit
def _leave(
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    partial: tl.tensor,
    line: tl.tensor,  # [n]
    is_query: tl.tensor,  # [n]
    top: tl.tensor,  # [n] float32
    total: tl.tensor,  # [n] float32
    mixed: tl.tensor,  # [n, head_dim] float32
    HEAD_DIM: tl.constexpr,
) -> None:
    """A partial result: lines from `partial` on."""
    line = partial + line
    tl.store(top_ptr + line, top, mask=is_query)
    tl.store(total_ptr + line, total, mask=is_query)
    cells = line[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(mixed_ptr + cells, mixed, mask=is_query[:, None])


@jit_once_for(
    "num_rows", "max_blocks", "window", "first_position", "quads_at_once", "table_stride", "table_ptr", "start_ptr",
    "end_ptr",
)  # fmt: skip
def _window_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    scale: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    quads_at_once: tl.tensor,
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
    SHARING: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program takes every n-th item: (unit of some row's keys, kv head, part of the window's queries).

    The kernels behind may start as soon as all programs run: what they do before they wait is hidden here.
    """
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    limit = max_blocks * BLOCK_SIZE
    rows, starts, ends, pieces, piece_keys, at_once = _units_of_rows(
        start_ptr, end_ptr, num_rows, limit, first_position, window, tile_time, sum_time, quad_sum_time, quads_at_once,
        ROWS, TILE, QUAD, GROUP, HAS_ENDS,
    )  # fmt: skip
    # Larger results of two pieces find no registers.
    is_paired = (at_once == 2) & (QUERIES * HEAD_DIM <= 32 * 128)
    at_once = tl.where(is_paired, 2, 1)
    units = tl.where(is_paired, (pieces + 1) // 2, pieces)
    units_through = tl.cumsum(units, 0)
    column = tl.arange(0, HEAD_DIM)
    num_items = tl.sum(units, 0) * KV_HEADS * PARTS
    lines = window * (KV_HEADS * SHARING)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        unit = item // (KV_HEADS * PARTS)
        kv_head = (item // PARTS) % KV_HEADS
        row = tl.sum((units_through <= unit).to(tl.int32), 0)
        of_row = rows == row
        start, row_end, first_unit, first_piece = tl.reduce(
            (
                tl.where(of_row, starts, 0),
                tl.where(of_row, ends, 0),
                tl.where(of_row, units_through - units, 0),
                tl.where(rows < row, pieces, 0),
            ),
            0,
            _add_four,
        )
        piece = (unit - first_unit) * at_once
        begin = piece * piece_keys
        end = tl.minimum(row_end, begin + piece_keys * at_once)
        row64 = row.to(tl.int64)

        entries_ptr = table_ptr + row64 * table_stride
        # A tile ahead of its keys, whose addresses would wait for it; the first before the kernel in front ends.
        next_block = _entries(entries_ptr, begin + tl.arange(0, TILE), first_position, end, BLOCK_SIZE, ".cg")
        if OVERLAPS:
            # Within the loop, for the assembler puts what stands in front of it behind the wait.
            tl.extra.cuda.gdc_wait()

        # Queries of a tile: places of the window, for each the heads that share the keys.
        query = (item % PARTS) * QUERIES + tl.arange(0, QUERIES)
        is_query = query < window * SHARING
        place = query // SHARING
        head = kv_head * SHARING + query % SHARING
        position = start + place
        q_offset = row64 * query_row_stride + place * query_place_stride + head * query_head_stride
        q = tl.load(query_ptr + q_offset[:, None] + column[None, :], mask=is_query[:, None], other=0)

        top = tl.full((QUERIES,), -float("inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        mixed = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
        group_top, group_total, group_mixed = top, total, mixed
        for tile in range(begin, end, TILE):
            token = tile + tl.arange(0, TILE)
            block = next_block.to(tl.int64 if IS_WIDE else tl.int32)
            next_block = _entries(entries_ptr, token + TILE, first_position, end, BLOCK_SIZE, "")
            exists = block >= 0
            cell = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
            cells = cell[:, None] + column[None, :]
            k = tl.load(key_ptr + cells, mask=exists[:, None], other=0)
            v = tl.load(value_ptr + cells, mask=exists[:, None], other=0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            is_visible = exists[None, :] & (token[None, :] <= position[:, None])
            scores = tl.where(is_visible, scores, -float("inf"))
            tile_top = tl.max(scores, 1) * scale
            base = tl.where(tile_top == -float("inf"), 0.0, tile_top)
            below = tl.broadcast_to(-base[:, None], scores.shape)
            weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, below)).to(
                v.dtype
            )
            # Summed by the tensor cores, in one order whatever the shape of the tile.
            ones = tl.full((TILE, 16), 1.0, v.dtype)
            tile_total = tl.max(tl.dot(weights, ones, input_precision="ieee"), 1)
            tile_mixed = tl.dot(weights, v, input_precision="ieee")
            top, total, mixed = _fold(top, total, mixed, tile_top, tile_total, tile_mixed)
            # Here, where no keys and values are in registers.
            if (tile + TILE < end) & ((tile + TILE) % QUAD == 0):
                group_top, group_total, group_mixed = _fold(
                    group_top, group_total, group_mixed, top, total, mixed
                )
                top = tl.full((QUERIES,), -float("inf"), tl.float32)
                total = tl.zeros((QUERIES,), tl.float32)
                mixed = tl.zeros((QUERIES, HEAD_DIM), tl.float32)

        line = place * (KV_HEADS * SHARING) + head
        partial = (first_piece + piece).to(tl.int64) * lines
        if end > begin + QUAD:
            if is_paired:
                _leave(
                    mixed_ptr, top_ptr, total_ptr, partial, line, is_query, group_top, group_total, group_mixed, HEAD_DIM
                )  # fmt: skip
                partial += lines
            else:
                top, total, mixed = _fold(group_top, group_total, group_mixed, top, total, mixed)
        if row_end > piece_keys:
            _leave(mixed_ptr, top_ptr, total_ptr, partial, line, is_query, top, total, mixed, HEAD_DIM)
        else:
            result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
            out_offset = row64 * out_row_stride + place * out_place_stride + head * out_head_stride
            result = result.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + out_offset[:, None] + column[None, :], result, mask=is_query[:, None])
    if OVERLAPS:
        # Who had no item, too: the kernel behind relies on all in front of this one.
        tl.extra.cuda.gdc_wait()


@jit
def _loaded(
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    partial: tl.tensor,  # [n] int64
    exists: tl.tensor,  # [n]
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(top, total, mixed) of partial results; those that do not exist change nothing."""
    top = tl.load(top_ptr + partial, mask=exists, other=-float("inf"))
    total = tl.load(total_ptr + partial, mask=exists, other=0.0)
    cells = partial[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    return top, total, tl.load(mixed_ptr + cells, mask=exists[:, None], other=0.0)


@jit
def _folded(
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    first_partial: tl.tensor,
    stride: tl.tensor,
    piece: tl.tensor,  # [n]: the first
    num_pieces: tl.tensor,
    SOME: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(top, total, mixed) of n times SOME neighbours, folded in order; all are asked for before one is waited for."""
    asked = _loaded(
        mixed_ptr, top_ptr, total_ptr, first_partial + piece * stride, piece < num_pieces, HEAD_DIM
    )
    for further in tl.static_range(1, SOME):
        partial = first_partial + (piece + further) * stride
        asked += _loaded(mixed_ptr, top_ptr, total_ptr, partial, piece + further < num_pieces, HEAD_DIM)
    top, total, mixed = asked[0], asked[1], asked[2]
    for at in tl.static_range(3, 3 * SOME, 3):
        top, total, mixed = _fold(top, total, mixed, asked[at], asked[at + 1], asked[at + 2])
    return top, total, mixed


@jit
def _groups_of_tiles(
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    first_partial: tl.tensor,
    stride: tl.tensor,
    group: tl.tensor,  # [n]
    num_tiles: tl.tensor,
    QUADS: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(top, total, mixed) of groups of QUADS quads of TILES tiles, all folded in order."""
    tops, totals, mixes = _folded(
        mixed_ptr, top_ptr, total_ptr, first_partial, stride, group * QUADS * TILES, num_tiles, TILES, HEAD_DIM
    )  # fmt: skip
    for quad in tl.static_range(1, QUADS):
        tile = (group * QUADS + quad) * TILES
        top, total, mixed = _folded(
            mixed_ptr, top_ptr, total_ptr, first_partial, stride, tile, num_tiles, TILES, HEAD_DIM
        )
        tops, totals, mixes = _fold(tops, totals, mixes, top, total, mixed)
    return tops, totals, mixes


@jit
def _add_groups(
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    tops: tl.tensor,  # [groups]
    totals: tl.tensor,  # [groups]
    mixes: tl.tensor,  # [groups, head_dim]
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """One query's sums with those of more groups; groups that do not exist change no bit."""
    highest = tl.maximum(top, tl.max(tops, 0))
    base = tl.where(highest == -float("inf"), 0.0, highest)
    shrink = tl.exp2(top - base)
    weights = tl.exp2(tops - base)
    total = total * shrink + tl.sum(totals * weights, 0)
    mixed = mixed * shrink + tl.sum(mixes * weights[:, None], 0)
    return highest, total, mixed


@jit_once_for(
    "num_rows", "max_blocks", "window", "first_position", "quads_at_once", "heads_per_program", "start_ptr", "end_ptr"
)  # fmt: skip
def _combine_kernel(
    mixed_ptr: tl.tensor,
    top_ptr: tl.tensor,
    total_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    first_position: tl.tensor,
    window: tl.tensor,
    tile_time: tl.tensor,
    sum_time: tl.tensor,
    quad_sum_time: tl.tensor,
    quads_at_once: tl.tensor,
    heads_per_program: tl.tensor,
    out_row_stride: tl.tensor,
    out_place_stride: tl.tensor,
    out_head_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    QUAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One program a query and some heads: sums the partial results, GROUPS groups at a time."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // window
    place = tl.program_id(0) % window
    limit = max_blocks * BLOCK_SIZE
    rows, starts, ends, pieces, piece_keys, _ = _units_of_rows(
        start_ptr, end_ptr, num_rows, limit, first_position, window, tile_time, sum_time, quad_sum_time, quads_at_once,
        ROWS, TILE, QUAD, GROUP, HAS_ENDS,
    )  # fmt: skip
    position = tl.sum(tl.where(rows == row, starts, 0), 0) + place
    first_piece = tl.sum(tl.where(rows < row, pieces, 0), 0)
    row_end = tl.sum(tl.where(rows == row, ends, 0), 0)
    end = tl.where(position >= first_position, tl.minimum(position + 1, row_end), 0)
    num_groups = (end + GROUP - 1) // GROUP
    num_tiles = (end + TILE - 1) // TILE
    num_quads = (end + QUAD - 1) // QUAD
    is_left = (row_end == 0) | (row_end > piece_keys)
    column = tl.arange(0, HEAD_DIM)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    first_head = tl.program_id(1) * heads_per_program
    last_head = tl.where(is_left, tl.minimum(first_head + heads_per_program, HEADS), first_head)
    stride = window * HEADS
    for head in range(first_head, last_head):
        first_partial = (first_piece * window + place).to(tl.int64) * HEADS + head
        top = -float("inf")
        total = 0.0
        mixed = tl.zeros((HEAD_DIM,), tl.float32)
        one = tl.zeros((1,), tl.int32)
        if (piece_keys == TILE) & (num_quads == 1):
            tops, totals, mixes = _folded(
                mixed_ptr, top_ptr, total_ptr, first_partial, stride, one, num_tiles, QUAD // TILE, HEAD_DIM
            )
            top, total, mixed = _add_groups(top, total, mixed, tops, totals, mixes)
        elif (piece_keys == TILE) & (num_groups == 1):
            tops, totals, mixes = _groups_of_tiles(
                mixed_ptr, top_ptr, total_ptr, first_partial, stride, one, num_tiles,
                GROUP // QUAD, QUAD // TILE, HEAD_DIM,
            )  # fmt: skip
            top, total, mixed = _add_groups(top, total, mixed, tops, totals, mixes)
        else:
            # One piece of code for all rows of more groups, so that they round alike. What stands above gives one group's
            # bits: to those, groups that do not exist add zeros.
            for first_group in range(0, num_groups, GROUPS):
                group = first_group + tl.arange(0, GROUPS)
                if piece_keys == TILE:
                    tops, totals, mixes = _groups_of_tiles(
                        mixed_ptr, top_ptr, total_ptr, first_partial, stride, group, num_tiles,
                        GROUP // QUAD, QUAD // TILE, HEAD_DIM,
                    )  # fmt: skip
                elif piece_keys == QUAD:
                    tops, totals, mixes = _folded(
                        mixed_ptr, top_ptr, total_ptr, first_partial, stride, group * (GROUP // QUAD), num_quads,
                        GROUP // QUAD, HEAD_DIM,
                    )  # fmt: skip
                else:
                    partial = first_partial + group * stride
                    tops, totals, mixes = _loaded(
                        mixed_ptr, top_ptr, total_ptr, partial, group < num_groups, HEAD_DIM
                    )
                top, total, mixed = _add_groups(top, total, mixed, tops, totals, mixes)
        result = mixed / tl.where(total == 0.0, 1.0, total)
        out_offset = row.to(tl.int64) * out_row_stride + place * out_place_stride + head * out_head_stride
        tl.store(out_ptr + out_offset + column, result.to(out_ptr.dtype.element_ty))


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
    there changes no query before it. The block table, start and end positions are older than the launch in front of this one:
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
    sharing = q_heads // kv_heads
    queries = _QUERIES[0] if window * sharing <= _QUERIES[0] else _QUERIES[1]
    parts = blocks_of(window * sharing, queries)
    num_multiprocessors = multiprocessors(query.device)
    warps = _warps(queries, head_dim)
    heads_per_program = _heads_per_program(rows, window, q_heads)
    load = _load(kv_heads * parts, window, num_multiprocessors, warps, heads_per_program)
    tile = _tile(query)
    group = _TILES * tile
    most_pieces = _most_pieces(rows, max_blocks * block_size, tile, load)
    num_partials = most_pieces * window * q_heads
    mixed = torch.empty(num_partials * head_dim, dtype=torch.float32, device=query.device)
    tops, totals = torch.empty(2, num_partials, dtype=torch.float32, device=query.device)
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
    _window_kernel[(num_multiprocessors * programs,)](
        query, key_cache, value_cache, block_table, start_positions, ends, out, mixed, tops, totals,
        *extent, scale * LOG2_E, *visible, *query.stride()[:3], *key_cache.stride()[:3],
        block_table.stride(0), *out.stride()[:3], SHARING=sharing, KV_HEADS=kv_heads, QUERIES=queries, PARTS=parts,
        IS_WIDE=key_cache.numel() >= 2**31, **shape, num_warps=warps, num_stages=_STAGES,
        **_OPTIONS, **launch,
    )  # fmt: skip
    _combine_kernel[(rows * window, blocks_of(q_heads, heads_per_program))](
        mixed, tops, totals, start_positions, ends, out, *extent, *visible, heads_per_program, *out.stride()[:3],
        HEADS=q_heads, GROUPS=_SUMMED_GROUPS, **shape, num_warps=blocks_of(head_dim, _COMBINED_BY_A_WARP), **_OPTIONS, **launch,
    )  # fmt: skip
