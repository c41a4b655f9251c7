"""The first kernel of split-KV: each program attends to a part of a row's keys and stores a partial result,
or the final one if the row has one part."""

from __future__ import annotations

from headway.kernels.attention._key_tiles import OPTIONS as _OPTIONS
from headway.kernels.attention._key_tiles import attend_tile, first_border, first_key, fold, no_keys
from headway.kernels.attention._split_kv_plan import counted_keys, split_rows
from headway.kernels.runtime._triton import jit, jit_once_for, tl

__all__ = ["_OPTIONS", "_partial_kernel"]


@jit
def _entries(
    entries_ptr: tl.tensor,
    token: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    CACHE: tl.constexpr,
) -> tl.tensor:
    """Returns the block ids of the tokens from `first` to `end`, -1 elsewhere."""
    is_wanted = (token >= first) & (token < end)
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
def _locate(
    unit: tl.tensor,
    at_once: tl.tensor,
    piece_keys: tl.tensor,
    rows: tl.tensor,  # [ROWS]
    starts: tl.tensor,  # [ROWS] int32
    ends: tl.tensor,  # [ROWS] int32
    pieces: tl.tensor,  # [ROWS] int32
    units: tl.tensor,  # [ROWS] int32
    unit_ends: tl.tensor,  # [ROWS] int32
    first_position: tl.tensor,
    sliding_window: tl.tensor,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns (the unit's row as int64; the row's start, its first visible key, and its number of counted
    keys; the unit's first piece among those of all rows, begin and end of the unit's keys)."""
    row = tl.sum((unit_ends <= unit).to(tl.int32), 0)
    of_row = rows == row
    start, row_end, first_unit, first_piece = tl.reduce(
        (
            tl.where(of_row, starts, 0),
            tl.where(of_row, ends, 0),
            tl.where(of_row, unit_ends - units, 0),
            tl.where(rows < row, pieces, 0),
        ),
        0,
        _add_four,
    )
    piece = (unit - first_unit) * at_once
    first = first_key(first_position, start, sliding_window)
    base, row_keys = counted_keys(first, row_end, sliding_window, GROUP)
    begin = base + piece * piece_keys
    end = tl.minimum(row_end, begin + piece_keys * at_once)
    return row.to(tl.int64), start, first, row_keys, first_piece + piece, begin, end


@jit
def _load_queries(
    query_ptr: tl.tensor,
    part: tl.tensor,
    kv_head: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    window: tl.tensor,
    row_stride: tl.tensor,
    place_stride: tl.tensor,
    head_stride: tl.tensor,
    GQA_GROUP_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns (whether the query exists, its index in the window, its head, its position, its values) for the
    part-th tile of queries, which has the heads of the GQA group for each index of the window."""
    query = part * QUERIES + tl.arange(0, QUERIES)
    is_query = query < window * GQA_GROUP_SIZE
    place = query // GQA_GROUP_SIZE
    head = kv_head * GQA_GROUP_SIZE + query % GQA_GROUP_SIZE
    position = start + place
    offset = row * row_stride + place * place_stride + head * head_stride
    column = tl.arange(0, HEAD_DIM)
    q = tl.load(query_ptr + offset[:, None] + column[None, :], mask=is_query[:, None], other=0)
    return is_query, place, head, position, q


@jit
def _store(
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    partial: tl.tensor,
    line: tl.tensor,  # [n]
    is_query: tl.tensor,  # [n]
    m_i: tl.tensor,  # [n] float32
    l_i: tl.tensor,  # [n] float32
    acc: tl.tensor,  # [n, head_dim] float32
    HEAD_DIM: tl.constexpr,
) -> None:
    """Stores a partial result in the lines from `partial` on."""
    line = partial + line
    tl.store(m_ptr + line, m_i, mask=is_query)
    tl.store(l_ptr + line, l_i, mask=is_query)
    cells = line[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(acc_ptr + cells, acc, mask=is_query[:, None])


@jit
def _store_result(
    out_ptr: tl.tensor,
    offset: tl.tensor,  # [n] int64
    is_query: tl.tensor,  # [n]
    l_i: tl.tensor,  # [n] float32
    acc: tl.tensor,  # [n, head_dim] float32
    HEAD_DIM: tl.constexpr,
) -> None:
    result = (acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]).to(out_ptr.dtype.element_ty)
    cells = offset[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out_ptr + cells, result, mask=is_query[:, None])


@jit_once_for(
    "num_rows", "max_blocks", "window", "first_position", "sliding_window", "quads_at_once", "table_stride", "table_ptr", "start_ptr",
    "end_ptr",
)  # fmt: skip
def _partial_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    scale: tl.tensor,
    slope: tl.tensor,
    first_position: tl.tensor,
    sliding_window: tl.tensor,
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
    GQA_GROUP_SIZE: tl.constexpr,
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
    """Each of n programs computes every n-th item: (unit of a row's keys, KV head, part of the window's
    queries). The next kernels may start as soon as all programs run, so that their work before their wait is
    hidden (PDL)."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    rows, starts, ends, pieces, piece_keys, at_once = split_rows(
        start_ptr, end_ptr, num_rows, max_blocks * BLOCK_SIZE, first_position, sliding_window, window, tile_time, sum_time, quad_sum_time,
        quads_at_once, ROWS, TILE, QUAD, GROUP, HAS_ENDS,
    )  # fmt: skip
    # Larger results of two pieces would not fit in registers.
    is_paired = (at_once == 2) & (QUERIES * HEAD_DIM <= 32 * 128)
    at_once = tl.where(is_paired, 2, 1)
    units = tl.where(is_paired, (pieces + 1) // 2, pieces)
    unit_ends = tl.cumsum(units, 0)
    factors = scale, slope, sliding_window
    num_items = tl.sum(units, 0) * KV_HEADS * PARTS
    lines = window * (KV_HEADS * GQA_GROUP_SIZE)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        unit = item // (KV_HEADS * PARTS)
        kv_head = (item // PARTS) % KV_HEADS
        row, start, first, row_keys, piece, begin, end = _locate(
            unit, at_once, piece_keys, rows, starts, ends, pieces, units, unit_ends, first_position, sliding_window, GROUP
        )  # fmt: skip
        first_tile = first_border(begin, first, sliding_window, TILE)

        entries_ptr = table_ptr + row * table_stride
        # Block ids are loaded a tile ahead of their keys, so that the keys' addresses need not wait; the
        # first ones are loaded before the preceding kernel ends.
        next_block = _entries(entries_ptr, first_tile + tl.arange(0, TILE), first, end, BLOCK_SIZE, ".cg")
        if OVERLAPS:
            # The wait is within the loop: the assembler would move the first loads after a wait that precedes
            # the loop.
            tl.extra.cuda.gdc_wait()

        is_query, place, head, position, q = _load_queries(
            query_ptr, item % PARTS, kv_head, row, start, window, query_row_stride, query_place_stride,
            query_head_stride, GQA_GROUP_SIZE, QUERIES, HEAD_DIM,
        )  # fmt: skip
        m_i, l_i, acc = no_keys(QUERIES, HEAD_DIM)
        group_m, group_l, group_acc = m_i, l_i, acc
        for tile in range(first_tile, end, TILE):
            token = tile + tl.arange(0, TILE)
            block = next_block.to(tl.int64 if IS_WIDE else tl.int32)
            next_block = _entries(entries_ptr, token + TILE, first, end, BLOCK_SIZE, "")
            exists = block >= 0
            cell = block * block_stride + (token % BLOCK_SIZE) * token_stride + kv_head * head_stride
            cells = cell[:, None] + tl.arange(0, HEAD_DIM)[None, :]
            k = tl.load(key_ptr + cells, mask=exists[:, None], other=0)
            v = tl.load(value_ptr + cells, mask=exists[:, None], other=0)
            tile_m, tile_l, tile_acc = attend_tile(q, k, v, exists, token, position, factors, TILE)
            m_i, l_i, acc = fold(m_i, l_i, acc, tile_m, tile_l, tile_acc)
            # Here no keys and values are in registers.
            if (tile + TILE < end) & ((tile + TILE) % QUAD == 0):
                group_m, group_l, group_acc = fold(group_m, group_l, group_acc, m_i, l_i, acc)
                m_i, l_i, acc = no_keys(QUERIES, HEAD_DIM)

        line = place * (KV_HEADS * GQA_GROUP_SIZE) + head
        partial = piece.to(tl.int64) * lines
        if end > begin + QUAD:
            if is_paired:
                _store(acc_ptr, m_ptr, l_ptr, partial, line, is_query, group_m, group_l, group_acc, HEAD_DIM)
                partial += lines
            else:
                m_i, l_i, acc = fold(group_m, group_l, group_acc, m_i, l_i, acc)
        if row_keys > piece_keys:
            _store(acc_ptr, m_ptr, l_ptr, partial, line, is_query, m_i, l_i, acc, HEAD_DIM)
        else:
            out_offset = row * out_row_stride + place * out_place_stride + head * out_head_stride
            _store_result(out_ptr, out_offset, is_query, l_i, acc, HEAD_DIM)
    if OVERLAPS:
        # Programs without an item wait, too, because the next kernel relies on all preceding kernels.
        tl.extra.cuda.gdc_wait()
