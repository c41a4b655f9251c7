"""The second kernel of split-KV: it combines the partial results of each query in one fixed order."""

from __future__ import annotations

from headway.kernels.attention._key_tiles import OPTIONS as _OPTIONS
from headway.kernels.attention._key_tiles import first_key, fold
from headway.kernels.attention._split_kv_plan import counted_keys, split_rows
from headway.kernels.runtime._triton import jit, jit_once_for, tl

__all__ = ["_OPTIONS", "_combine_kernel"]


@jit
def _load_partials(
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    partial: tl.tensor,  # [n] int64
    exists: tl.tensor,  # [n]
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of partial results; those that do not exist change nothing."""
    m_i = tl.load(m_ptr + partial, mask=exists, other=-float("inf"))
    l_i = tl.load(l_ptr + partial, mask=exists, other=0.0)
    cells = partial[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    return m_i, l_i, tl.load(acc_ptr + cells, mask=exists[:, None], other=0.0)


@jit
def _fold_neighbours(
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    first_partial: tl.tensor,
    stride: tl.tensor,
    piece: tl.tensor,  # [n]: the first
    num_pieces: tl.tensor,
    SOME: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of n times SOME neighbours, folded in order; all loads are issued before the first
    is needed."""
    asked = _load_partials(
        acc_ptr, m_ptr, l_ptr, first_partial + piece * stride, piece < num_pieces, HEAD_DIM
    )
    for further in tl.static_range(1, SOME):
        partial = first_partial + (piece + further) * stride
        asked += _load_partials(acc_ptr, m_ptr, l_ptr, partial, piece + further < num_pieces, HEAD_DIM)
    m_i, l_i, acc = asked[0], asked[1], asked[2]
    for at in tl.static_range(3, 3 * SOME, 3):
        m_i, l_i, acc = fold(m_i, l_i, acc, asked[at], asked[at + 1], asked[at + 2])
    return m_i, l_i, acc


@jit
def _fold_groups(
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    first_partial: tl.tensor,
    stride: tl.tensor,
    group: tl.tensor,  # [n]
    num_tiles: tl.tensor,
    QUADS: tl.constexpr,
    TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (m, l, acc) of groups of QUADS quads of TILES tiles, all folded in order."""
    ms, ls, accs = _fold_neighbours(
        acc_ptr, m_ptr, l_ptr, first_partial, stride, group * QUADS * TILES, num_tiles, TILES, HEAD_DIM
    )  # fmt: skip
    for quad in tl.static_range(1, QUADS):
        tile = (group * QUADS + quad) * TILES
        m_i, l_i, acc = _fold_neighbours(
            acc_ptr, m_ptr, l_ptr, first_partial, stride, tile, num_tiles, TILES, HEAD_DIM
        )
        ms, ls, accs = fold(ms, ls, accs, m_i, l_i, acc)
    return ms, ls, accs


@jit
def _add_groups(
    m_i: tl.tensor,  # [1] float32
    l_i: tl.tensor,  # [1] float32
    acc: tl.tensor,  # [1, head_dim] float32
    ms: tl.tensor,  # [groups] float32
    ls: tl.tensor,  # [groups] float32
    accs: tl.tensor,  # [groups, head_dim] float32
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns one query's sums with those of the first num_groups of these groups, folded in order."""
    group = tl.arange(0, GROUPS)
    for i in range(num_groups):
        # Adding zeros selects one group exactly.
        is_next = group == i
        next_m = tl.zeros((1,), tl.float32) + tl.sum(tl.where(is_next, ms, 0.0), 0)
        next_l = tl.zeros((1,), tl.float32) + tl.sum(tl.where(is_next, ls, 0.0), 0)
        next_acc = tl.sum(tl.where(is_next[:, None], accs, 0.0), 0)
        m_i, l_i, acc = fold(m_i, l_i, acc, next_m, next_l, next_acc[None, :])
    return m_i, l_i, acc


@jit_once_for(
    "num_rows", "max_blocks", "window", "first_position", "sliding_window", "quads_at_once", "heads_per_program", "start_ptr", "end_ptr"
)  # fmt: skip
def _combine_kernel(
    acc_ptr: tl.tensor,
    m_ptr: tl.tensor,
    l_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    first_position: tl.tensor,
    sliding_window: tl.tensor,
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
    """Each program combines the partial results of one query and some heads, GROUPS groups at a time."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) // window
    place = tl.program_id(0) % window
    limit = max_blocks * BLOCK_SIZE
    rows, starts, ends, pieces, piece_keys, _ = split_rows(
        start_ptr, end_ptr, num_rows, limit, first_position, sliding_window, window, tile_time, sum_time, quad_sum_time,
        quads_at_once, ROWS, TILE, QUAD, GROUP, HAS_ENDS,
    )  # fmt: skip
    start = tl.sum(tl.where(rows == row, starts, 0), 0)
    position = start + place
    first_piece = tl.sum(tl.where(rows < row, pieces, 0), 0)
    row_end = tl.sum(tl.where(rows == row, ends, 0), 0)
    end = tl.where(position >= first_position, tl.minimum(position + 1, row_end), 0)
    first = first_key(first_position, start, sliding_window)
    _, row_keys = counted_keys(first, row_end, sliding_window, GROUP)
    _, num_keys = counted_keys(first, end, sliding_window, GROUP)
    num_groups = (num_keys + GROUP - 1) // GROUP
    num_tiles = (num_keys + TILE - 1) // TILE
    num_quads = (num_keys + QUAD - 1) // QUAD
    is_left = (row_keys == 0) | (row_keys > piece_keys)
    column = tl.arange(0, HEAD_DIM)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    first_head = tl.program_id(1) * heads_per_program
    last_head = tl.where(is_left, tl.minimum(first_head + heads_per_program, HEADS), first_head)
    stride = window * HEADS
    for head in range(first_head, last_head):
        first_partial = (first_piece * window + place).to(tl.int64) * HEADS + head
        m_i = tl.full((1,), -float("inf"), tl.float32)
        l_i = tl.zeros((1,), tl.float32)
        acc = tl.zeros((1, HEAD_DIM), tl.float32)
        one = tl.zeros((1,), tl.int32)
        if (piece_keys == TILE) & (num_quads == 1):
            ms, ls, accs = _fold_neighbours(
                acc_ptr, m_ptr, l_ptr, first_partial, stride, one, num_tiles, QUAD // TILE, HEAD_DIM
            )
            m_i, l_i, acc = ms, ls, accs
        elif (piece_keys == TILE) & (num_groups == 1):
            ms, ls, accs = _fold_groups(
                acc_ptr, m_ptr, l_ptr, first_partial, stride, one, num_tiles,
                GROUP // QUAD, QUAD // TILE, HEAD_DIM,
            )  # fmt: skip
            m_i, l_i, acc = ms, ls, accs
        else:
            for first_group in range(0, num_groups, GROUPS):
                group = first_group + tl.arange(0, GROUPS)
                if piece_keys == TILE:
                    ms, ls, accs = _fold_groups(
                        acc_ptr, m_ptr, l_ptr, first_partial, stride, group, num_tiles,
                        GROUP // QUAD, QUAD // TILE, HEAD_DIM,
                    )  # fmt: skip
                elif piece_keys == QUAD:
                    ms, ls, accs = _fold_neighbours(
                        acc_ptr, m_ptr, l_ptr, first_partial, stride, group * (GROUP // QUAD), num_quads,
                        GROUP // QUAD, HEAD_DIM,
                    )  # fmt: skip
                else:
                    partial = first_partial + group * stride
                    ms, ls, accs = _load_partials(
                        acc_ptr, m_ptr, l_ptr, partial, group < num_groups, HEAD_DIM
                    )
                some = tl.minimum(num_groups - first_group, GROUPS)
                m_i, l_i, acc = _add_groups(m_i, l_i, acc, ms, ls, accs, some, GROUPS)
        result = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
        out_offset = row.to(tl.int64) * out_row_stride + place * out_place_stride + head * out_head_stride
        tl.store(out_ptr + out_offset + column[None, :], result.to(out_ptr.dtype.element_ty))
