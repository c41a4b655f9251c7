"""The attention kernel on Hopper: two warpgroups compute their own queries, and one warp copies keys and
values for both.

A warpgroup keeps the partial sums of a tile and of a quad of tiles in registers, those of a group in shared
memory, and those of all earlier groups in global memory. With wide heads the sums of a group are in global
memory, too, and a tile is folded into its quad piece by piece, because registers do not hold more.
"""

from __future__ import annotations

from headway.kernels.attention._hopper_attention_copies import copy_tiles, find_tile
from headway.kernels.attention._hopper_attention_tiles import (
    attend_values,
    cap,
    fold,
    fold_into_stored,
    fold_last,
    fold_values,
    load_group,
    mask,
    no_keys,
    score,
    store_group,
    store_sums,
    unhoisted,
    weigh,
)
from headway.kernels.attention._key_tiles import OPTIONS
from headway.kernels.linear._hopper_tiles import next_turn
from headway.kernels.runtime._triton import gl, gluon_jit_once_for, hopper, tl

__all__ = ["_OPTIONS", "_streamed_attention_kernel"]

# maxnreg: the registers of a thread before the warps are specialised.
_OPTIONS = {**OPTIONS, "maxnreg": 168}


@gluon_jit_once_for()
def _weigh_first(
    q: gl.shared_memory_descriptor,
    turns: gl.tuple,
    ring: gl.tuple,
    first_query: gl.tensor,
    first: gl.tensor,
    first_position: gl.tensor,
    end: gl.tensor,
    factors: gl.tuple,
    operand: gl.constexpr,
    PACKED: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tuple:
    """Returns ((weights, m) of the first tile, the positions of the queries, which begin at first_query,
    turns). first: the tile's first key. factors: those of `score_factors`."""
    scale, slope, sliding_window = factors
    keys, _values, k_full, _v_full, k_empty, _v_empty = ring
    k_turn, v_turn = turns
    k_stage, k_parity = k_turn
    hopper.mbarrier.wait(k_full.index(k_stage), k_parity)
    scores = score(q, keys.index(k_stage), is_async=False)
    hopper.mbarrier.arrive(k_empty.index(k_stage), count=1)
    by_queries: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    position = first_query + gl.arange(0, q.shape[0], layout=by_queries) // PACKED
    scores = mask(cap(scores, slope), first, first_position, end, position, sliding_window, TILE)
    return weigh(scores, scale, operand, q.dtype), position, (next_turn(k_turn, STAGES), v_turn)


@gluon_jit_once_for()
def _step(
    quad: gl.tuple,  # its (m, l, accumulators) so far
    tile: gl.tuple,  # (weights, m) of its keys
    turns: gl.tuple,
    q: gl.shared_memory_descriptor,
    ring: gl.tuple,
    ones: gl.shared_memory_descriptor,
    position: gl.tensor,
    next_first: gl.tensor,
    end: gl.tensor,
    factors: gl.tuple,
    IS_WHOLE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
) -> gl.tuple:
    """Adds a tile to its quad while the scores of the next tile are computed, then computes the weights of
    the next tile. IS_WHOLE: every query sees all keys of the next tile. factors: those of `score_factors`."""
    scale, slope, sliding_window = factors
    weights, tile_m = tile
    operand: gl.constexpr = weights.type.layout
    dtype: gl.constexpr = q.dtype
    keys, values, k_full, v_full, k_empty, v_empty = ring
    k_turn, v_turn = turns
    k_stage, k_parity = k_turn
    v_stage, v_parity = v_turn
    hopper.mbarrier.wait(v_full.index(v_stage), v_parity)
    if PIECES > 2:
        # This wait precedes all products, because the compiler would delay folding past a later wait.
        hopper.mbarrier.wait(k_full.index(k_stage), k_parity)
        quad, last_piece, of_last = fold_values(quad, tile, values.index(v_stage), ones)
        scores = score(q, keys.index(k_stage), is_async=True)
        product, _weights = hopper.warpgroup_mma_wait(num_outstanding=1, deps=last_piece)
        hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
        quad = fold_last(quad, product, of_last)
    else:
        tile_l, tile_accs = attend_values(weights, values.index(v_stage), ones, PIECES)
        hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
        hopper.mbarrier.wait(k_full.index(k_stage), k_parity)
        scores = score(q, keys.index(k_stage), is_async=True)
        quad = fold(quad, (tile_m, tile_l, tile_accs))
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[scores])
    hopper.mbarrier.arrive(k_empty.index(k_stage), count=1)
    scores = cap(scores, slope)
    if not IS_WHOLE:
        scores = mask(scores, next_first, 0, end, position, sliding_window, TILE)
    following = weigh(scores, scale, operand, dtype)
    return quad, following, (next_turn(k_turn, STAGES), next_turn(v_turn, STAGES))


@gluon_jit_once_for()
def _clear_tail(
    values: gl.shared_memory_descriptor,  # [PIECES * TILE, PIECE]
    end: gl.tensor,
    cleared: gl.shared_memory_descriptor,
    parity: gl.tensor,
    PART: gl.constexpr,
    PIECES: gl.constexpr,
) -> None:
    """Sets the last tile's values from key `end` on to zero, because that memory may hold NaN. Each warpgroup
    clears its half of the keys and waits for the other."""
    HALF: gl.constexpr = values.shape[0] // PIECES // 2
    PIECE: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PIECE, PIECE // 8], [4, 1], [1, 0])
    key = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    for piece in gl.static_range(PIECES):
        own_half = values.slice((2 * piece + PART) * HALF, HALF)
        own_half.store(gl.where(gl.expand_dims(key < end, 1), own_half.load(layout), 0.0))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(cleared.index(0), count=1)
    hopper.mbarrier.wait(cleared.index(0), parity)


@gluon_jit_once_for()
def _add_last(
    quad: gl.tuple,
    tile: gl.tuple,
    turns: gl.tuple,
    ring: gl.tuple,
    ones: gl.shared_memory_descriptor,
    cleared: gl.shared_memory_descriptor,
    parity: gl.tensor,
    end: gl.tensor,
    PART: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES: gl.constexpr,
) -> gl.tuple:
    """Adds the last tile to its quad as `_step` does. Returns (quad, turns, parity)."""
    _keys, values, _k_full, v_full, _k_empty, v_empty = ring
    k_turn, v_turn = turns
    v_stage, v_parity = v_turn
    hopper.mbarrier.wait(v_full.index(v_stage), v_parity)
    if end % TILE > 0:
        _clear_tail(values.index(v_stage), end % TILE, cleared, parity, PART, PIECES)
        parity ^= 1
    if PIECES > 2:
        quad, last_piece, of_last = fold_values(quad, tile, values.index(v_stage), ones)
        product, _weights = hopper.warpgroup_mma_wait(num_outstanding=0, deps=last_piece)
        quad = fold_last(quad, product, of_last)
    else:
        weights, tile_m = tile
        tile_l, tile_accs = attend_values(weights, values.index(v_stage), ones, PIECES)
        quad = fold(quad, (tile_m, tile_l, tile_accs))
    hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
    return quad, (k_turn, next_turn(v_turn, STAGES)), parity


@gluon_jit_once_for()
def _rows_of(
    tensor: gl.tuple,  # (pointer, strides of tokens and heads)
    first: gl.tensor,
    place: gl.tensor,
    length: gl.tensor,
    head: gl.tensor,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PACKED: gl.constexpr,
    layout: gl.constexpr,
) -> gl.tuple:
    """Returns (pointers to the ROWS rows of a warpgroup, whether their queries exist). The rows begin at
    query `place` of the chunk whose first token is `first`; the PACKED heads of a query are adjacent rows."""
    ptr, token_stride, head_stride = tensor
    row = unhoisted(gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    place += row // PACKED
    offsets = (first + place) * token_stride + (head + row % PACKED) * head_stride
    return ptr + gl.expand_dims(offsets, 1) + gl.expand_dims(column, 0), gl.expand_dims(place < length, 1)


@gluon_jit_once_for()
def _attend(
    cells: gl.shared_memory_descriptor,  # [ROWS, HEAD_DIM], of this warpgroup alone
    group: gl.shared_memory_descriptor,  # [PIECES * ROWS, PIECE] float32, of this warpgroup alone
    stored_ptr: gl.tensor,  # [2, 1 or 2, PIECES, ROWS, PIECE] float32, of this program: totals; groups of wide heads
    ring: gl.tuple,
    ones: gl.shared_memory_descriptor,
    cleared: gl.shared_memory_descriptor,  # a barrier of both warpgroups
    query: gl.tuple,  # (pointer, strides of tokens and heads)
    out: gl.tuple,  # (pointer, strides of tokens and heads)
    chunks: gl.tuple,
    limit: gl.tensor,
    first_position: gl.tensor,
    factors: gl.tuple,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    PACKED: gl.constexpr,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    QUAD: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Runs the work of one warpgroup: the PART-th half of each of the program's tiles of queries."""
    _scale, _slope, sliding_window = factors
    ROWS: gl.constexpr = cells.shape[0]
    HEAD_DIM: gl.constexpr = cells.shape[1]
    PIECE: gl.constexpr = group.shape[1]
    PIECES: gl.constexpr = HEAD_DIM // PIECE
    IS_WIDE: gl.constexpr = PIECES > 2
    by_values: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, by_values, 2)
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    own = PART * (ROWS // PACKED)
    totals_ptr = stored_ptr + PART * (ROWS * HEAD_DIM * (2 if IS_WIDE else 1))
    groups_ptr = totals_ptr + ROWS * HEAD_DIM
    turns = (gl.to_tensor(0), gl.to_tensor(0)), (gl.to_tensor(0), gl.to_tensor(0))
    cleared_parity = gl.to_tensor(0)
    item = gl.program_id(0)
    num_items = item + 1
    while item < num_items:
        num_indices, _chunk, first, length, start, place, end, first_tile, num_tiles, whole = find_tile(
            item // HEADS, chunks, limit, sliding_window, CHUNKS, QUERIES, TILE
        )
        num_items = num_indices * HEADS
        place += own
        head = item % HEADS * PACKED
        if num_tiles > 0:
            q_ptr, is_query = _rows_of(query, first, place, length, head, ROWS, HEAD_DIM, PACKED, by_rows)
            cells.store(gl.load(q_ptr, mask=is_query, other=0.0))
            hopper.fence_async_shared()
            tile, position, turns = _weigh_first(
                cells, turns, ring, start + place, first_tile * TILE, first_position, end, factors, operand, PACKED, TILE, STAGES,
            )  # fmt: skip
            sums = no_keys(ROWS, PIECE, PIECES, by_values)
            group_m, group_l, _accs = sums
            total_m, total_l, _accs = sums
            last_tile = num_tiles - 1
            first_quad = first_tile // QUAD * QUAD
            for quad_first in range(first_quad, num_tiles, QUAD):
                sums = no_keys(ROWS, PIECE, PIECES, by_values)
                quad_end = gl.minimum(quad_first + QUAD, last_tile)
                quad_begin = quad_first
                if sliding_window is not None:
                    quad_begin = gl.maximum(quad_first, first_tile)
                whole_end = gl.maximum(gl.minimum(quad_end, whole - 1), quad_begin)
                for index in range(quad_begin, whole_end):
                    sums, tile, turns = _step(
                        sums, tile, turns, cells, ring, ones, position, (index + 1) * TILE, end, factors,
                        True, TILE, STAGES, PIECES,
                    )  # fmt: skip
                for index in range(whole_end, quad_end):
                    sums, tile, turns = _step(
                        sums, tile, turns, cells, ring, ones, position, (index + 1) * TILE, end, factors,
                        False, TILE, STAGES, PIECES,
                    )  # fmt: skip
                if quad_first + QUAD > last_tile:
                    sums, turns, cleared_parity = _add_last(
                        sums, tile, turns, ring, ones, cleared, cleared_parity, end, PART, TILE, STAGES, PIECES
                    )  # fmt: skip
                # The quad joins its group, and the group, once it is whole, the total.
                is_last = quad_first + QUAD >= num_tiles
                is_whole_group = (quad_first + QUAD) % GROUP == 0
                is_joined = quad_first % GROUP > 0
                if sliding_window is not None:
                    is_joined &= quad_first > first_quad
                if is_joined:
                    if IS_WIDE:
                        sums = fold_into_stored(group_m, group_l, groups_ptr, sums)
                    else:
                        sums = fold((group_m, group_l, load_group(group, PIECES, by_values)), sums)
                if (is_whole_group | is_last) & (quad_first >= first_tile // GROUP * GROUP + GROUP):
                    sums = fold_into_stored(total_m, total_l, totals_ptr, sums)
                if not is_last:
                    m_i, l_i, accs = sums
                    if is_whole_group:
                        total_m, total_l = m_i, l_i
                        store_sums(totals_ptr, accs)
                    else:
                        group_m, group_l = m_i, l_i
                        if IS_WIDE:
                            store_sums(groups_ptr, accs)
                        else:
                            store_group(group, accs)
            _m_i, l_i, accs = sums
            whole_weight = gl.expand_dims(gl.where(l_i == 0.0, 1.0, l_i), 1)
            for piece in gl.static_range(PIECES):
                cells.slice(piece * PIECE, PIECE, dim=1).store((accs[piece] / whole_weight).to(cells.dtype))
            out_ptr, is_query = _rows_of(out, first, place, length, head, ROWS, HEAD_DIM, PACKED, by_rows)
            gl.store(out_ptr, cells.load(by_rows), mask=is_query)
        elif CHUNKS == 0:
            out_ptr, is_query = _rows_of(out, first, place, length, head, ROWS, HEAD_DIM, PACKED, by_rows)
            gl.store(out_ptr, gl.zeros([ROWS, HEAD_DIM], cells.dtype, layout=by_rows), mask=is_query)
        item += gl.num_programs(0)


@gluon_jit_once_for(
    "num_chunks", "window", "max_blocks", "first_position", "sliding_window", "table_stride", "table_ptr", "first_ptr", "length_ptr", "start_ptr"
)  # fmt: skip
def _streamed_attention_kernel(
    k_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    v_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    query_ptr: gl.tensor,
    table_ptr: gl.tensor,
    first_ptr: gl.tensor,
    length_ptr: gl.tensor,
    start_ptr: gl.tensor,
    stored_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_chunks: gl.tensor,
    window: gl.tensor,
    max_blocks: gl.tensor,
    first_position: gl.tensor,
    scale: gl.tensor,
    slope: gl.tensor,
    sliding_window: gl.tensor,
    query_token_stride: gl.tensor,
    query_head_stride: gl.tensor,
    table_stride: gl.tensor,
    out_token_stride: gl.tensor,
    out_head_stride: gl.tensor,
    HEADS: gl.constexpr,
    GQA_GROUP_SIZE: gl.constexpr,
    PACKED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    QUAD: gl.constexpr,
    GROUP: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """Each of n programs computes every n-th item: QUERIES queries of a chunk and PACKED heads of a GQA
    group. The last queries, which see most keys, come first."""
    PIECES: gl.constexpr = HEAD_DIM // PIECE
    ROWS: gl.constexpr = QUERIES * PACKED // 2
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    sums: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    cells = gl.allocate_shared_memory(k_desc.dtype, [2, ROWS, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(k_desc.dtype, [STAGES, PIECES * TILE, PIECE], shared)
    IS_WIDE: gl.constexpr = PIECES > 2
    groups = gl.allocate_shared_memory(gl.float32, [2, 8 if IS_WIDE else PIECES * ROWS, PIECE], sums)
    ones = gl.allocate_shared_memory(k_desc.dtype, [8, TILE], shared)
    ones.store(
        gl.full([8, TILE], 1.0, k_desc.dtype, layout=gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
    )
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    cleared = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    hopper.mbarrier.init(cleared.index(0), count=2)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(stage), count=1)
        hopper.mbarrier.init(v_full.index(stage), count=1)
        hopper.mbarrier.init(k_empty.index(stage), count=2)
        hopper.mbarrier.init(v_empty.index(stage), count=2)
    hopper.fence_async_shared()
    tl.debug_barrier()
    ring = keys, values, k_full, v_full, k_empty, v_empty
    chunks = first_ptr, length_ptr, start_ptr, num_chunks, window
    query = query_ptr, query_token_stride, query_head_stride
    out = out_ptr, out_token_stride, out_head_stride
    limit = max_blocks * BLOCK_SIZE
    factors = scale, slope, sliding_window
    own_stored_ptr = stored_ptr + gl.program_id(0) * ((4 if IS_WIDE else 2) * ROWS * HEAD_DIM)
    gl.warp_specialize(
        [
            (_attend, (
                cells.index(0), groups.index(0), own_stored_ptr, ring, ones, cleared, query, out, chunks, limit, first_position, factors,
                0, HEADS, PACKED, CHUNKS, QUERIES, TILE, QUAD, GROUP, STAGES,
            )),
            (_attend, (
                cells.index(1), groups.index(1), own_stored_ptr, ring, ones, cleared, query, out, chunks, limit, first_position, factors,
                1, HEADS, PACKED, CHUNKS, QUERIES, TILE, QUAD, GROUP, STAGES,
            )),
            (copy_tiles, (
                k_desc, v_desc, ring, table_ptr, table_stride, max_blocks, chunks, sliding_window,
                HEADS, PACKED, GQA_GROUP_SIZE, BLOCK_SIZE, PIECE, CHUNKS, QUERIES, TILE, STAGES,
            )),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip
    hopper.mbarrier.invalidate(cleared.index(0))
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.invalidate(k_full.index(stage))
        hopper.mbarrier.invalidate(v_full.index(stage))
        hopper.mbarrier.invalidate(k_empty.index(stage))
        hopper.mbarrier.invalidate(v_empty.index(stage))
