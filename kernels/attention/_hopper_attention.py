"""Causal attention of chunks over the paged cache on Hopper: one warp of a program asks for keys and values in bulk copies,
two warpgroups multiply them, each for queries of its own, and weigh a tile's scores while the products of others run.

In Gluon, Triton's lower level; not interpreted. After FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608). Tiles of keys
are cut and added up as `prefill_attention` does it.
"""

from __future__ import annotations

import torch

from headway.kernels.attention._checks import LOG2_E
from headway.kernels.attention._hopper_attention_copies import copy_tiles, find_tile, next_turn
from headway.kernels.attention.dispatch import packed_heads
from headway.kernels.linear._hopper_core import has_bulk_copies
from headway.kernels.runtime._triton import (
    TensorDescriptor,
    blocks_of,
    gl,
    gluon_jit_once_for,
    hopper,
    power_of_two,
    tl,
)

# Of a program, queries times heads; a warpgroup has half of them.
ROWS = 128
TILE = 64
_STAGES = 3
_TYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128)
# Columns of 16-bit numbers that lie side by side in shared memory.
_PIECE = 64
# Of a thread while all have the same; then of the second warpgroup and of the copying warp, whose three companions only take
# registers: the first warpgroup gets what they leave, as much as the second.
_OPTIONS, _REGISTERS = {"maxnreg": 168}, (224, 56)


@gluon_jit_once_for()
def _score(
    q: gl.shared_memory_descriptor, keys: gl.shared_memory_descriptor, is_async: gl.constexpr
) -> gl.tensor:
    """[ROWS, TILE]."""
    ROWS: gl.constexpr = q.shape[0]
    TILE: gl.constexpr = keys.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16]
    )
    nothing = gl.zeros([ROWS, TILE], gl.float32, layout=layout)
    return hopper.warpgroup_mma(q, keys.permute((1, 0)), nothing, use_acc=False, is_async=is_async)


@gluon_jit_once_for()
def _mask(
    scores: gl.tensor, first: gl.tensor, end: gl.tensor, position: gl.tensor, TILE: gl.constexpr
) -> gl.tensor:
    token = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, scores.type.layout))
    is_visible = gl.expand_dims(token < end, 0) & (gl.expand_dims(token, 0) <= gl.expand_dims(position, 1))
    return gl.where(is_visible, scores, -float("inf"))


@gluon_jit_once_for()
def _weigh(scores: gl.tensor, m_i: gl.tensor, l_i: gl.tensor, scale: gl.tensor) -> gl.tuple:
    """(weights, highest score so far, sum of the weights so far, by what earlier weights shrink)."""
    highest = gl.maximum(m_i, gl.max(scores, 1) * scale)
    base = gl.where(highest == -float("inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    shrink = gl.exp2(m_i - base)
    return weights, highest, l_i * shrink + gl.sum(weights, 1), shrink


@gluon_jit_once_for()
def _step(
    state: gl.tuple,
    q: gl.shared_memory_descriptor,
    ring: gl.tuple,
    position: gl.tensor,
    tile: gl.tensor,
    end: gl.tensor,
    scale: gl.tensor,
    IS_WHOLE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> gl.tuple:
    """Adds a tile's values, while the scores of the next one are made and weighed. IS_WHOLE: every query sees all of these."""
    acc, weights, m_i, l_i, k_turn, v_turn = state
    keys, values, k_full, v_full, k_empty, v_empty = ring
    by_values: gl.constexpr = acc.type.layout
    k_stage, k_parity = k_turn
    hopper.mbarrier.wait(k_full.index(k_stage), k_parity)
    scores = _score(q, keys.index(k_stage), is_async=True)
    v_stage, v_parity = v_turn
    hopper.mbarrier.wait(v_full.index(v_stage), v_parity)
    running = hopper.warpgroup_mma(weights, values.index(v_stage), acc, is_async=True)
    scores = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[scores])
    hopper.mbarrier.arrive(k_empty.index(k_stage), count=1)
    if not IS_WHOLE:
        scores = _mask(scores, (tile + 1) * TILE, end, position, TILE)
    new, m_i, l_i, shrink = _weigh(scores, m_i, l_i, scale)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[running])
    hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
    acc *= gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, by_values)), 1)
    weights = gl.convert_layout(new.to(keys.dtype), weights.type.layout)
    return acc, weights, m_i, l_i, next_turn(k_turn, STAGES), next_turn(v_turn, STAGES)


@gluon_jit_once_for()
def _attend(
    cells: gl.shared_memory_descriptor,  # [ROWS, HEAD_DIM], the warpgroup's own
    ring: gl.tuple,
    cleared: gl.shared_memory_descriptor,  # a barrier of both warpgroups
    query: gl.tuple,  # (pointer, strides of tokens and heads)
    out: gl.tuple,  # likewise
    chunks: gl.tuple,
    limit: gl.tensor,
    scale: gl.tensor,
    first_head: gl.tensor,
    PART: gl.constexpr,
    PACKED: gl.constexpr,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Runs the work of one warpgroup: the PART-th half of each of the program's tiles of queries."""
    keys, values, k_full, v_full, k_empty, v_empty = ring
    query_ptr, query_token_stride, query_head_stride = query
    out_ptr, out_token_stride, out_head_stride = out
    ROWS: gl.constexpr = cells.shape[0]
    HEAD_DIM: gl.constexpr = cells.shape[1]
    by_values: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_rows))  # the heads of a query side by side
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, by_rows))
    own = PART * (ROWS // PACKED)
    k_turn = gl.to_tensor(0), gl.to_tensor(0)
    v_turn = gl.to_tensor(0), gl.to_tensor(0)
    HALF: gl.constexpr = PART * (TILE // 2)
    key = HALF + gl.arange(0, TILE // 2, layout=gl.SliceLayout(1, by_rows))
    cleared_parity = gl.to_tensor(0)
    index = gl.program_id(1)
    num_indices = index + 1
    while index < num_indices:
        num_indices, _chunk, first, length, start, place, end, num_tiles, whole = find_tile(
            index, chunks, limit, CHUNKS, QUERIES, TILE
        )
        place += own
        token = first + place + row // PACKED
        head = first_head + row % PACKED
        is_query = gl.expand_dims(place + row // PACKED < length, 1)
        out_offsets = gl.expand_dims(token * out_token_stride + head * out_head_stride, 1)
        if num_tiles > 0:
            offsets = gl.expand_dims(token * query_token_stride + head * query_head_stride, 1)
            cells.store(gl.load(query_ptr + offsets + gl.expand_dims(column, 0), mask=is_query, other=0.0))
            hopper.fence_async_shared()

            k_stage, k_parity = k_turn
            hopper.mbarrier.wait(k_full.index(k_stage), k_parity)
            scores = _score(cells, keys.index(k_stage), is_async=False)
            hopper.mbarrier.arrive(k_empty.index(k_stage), count=1)
            by_scores: gl.constexpr = scores.type.layout
            position = start + place + gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_scores)) // PACKED
            m_i = gl.full([ROWS], -float("inf"), gl.float32, layout=gl.SliceLayout(1, by_scores))
            l_i = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, by_scores))
            new, m_i, l_i, _shrink = _weigh(_mask(scores, 0, end, position, TILE), m_i, l_i, scale)
            weights = gl.convert_layout(new.to(keys.dtype), gl.DotOperandLayout(0, by_values, 2))
            acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=by_values)
            state = acc, weights, m_i, l_i, next_turn(k_turn, STAGES), v_turn
            for tile in range(whole - 1):
                state = _step(state, cells, ring, position, tile, end, scale, True, TILE, STAGES)
            for tile in range(gl.maximum(whole - 1, 0), num_tiles - 1):
                state = _step(state, cells, ring, position, tile, end, scale, False, TILE, STAGES)
            acc, weights, m_i, l_i, k_turn, v_turn = state

            v_stage, v_parity = v_turn
            hopper.mbarrier.wait(v_full.index(v_stage), v_parity)
            last = values.index(v_stage)
            if end % TILE > 0:
                # Behind the last key there may be anything, no number even. Each warpgroup clears what it finds in its half.
                own_half = last.slice(HALF, TILE // 2)
                own_half.store(gl.where(gl.expand_dims(key < end % TILE, 1), own_half.load(by_rows), 0.0))
                hopper.fence_async_shared()
                hopper.mbarrier.arrive(cleared.index(0), count=1)
                hopper.mbarrier.wait(cleared.index(0), cleared_parity)
                cleared_parity ^= 1
            acc = hopper.warpgroup_mma(weights, last, acc)
            hopper.mbarrier.arrive(v_empty.index(v_stage), count=1)
            v_turn = next_turn(v_turn, STAGES)
            whole_weight = gl.convert_layout(gl.where(l_i == 0.0, 1.0, l_i), gl.SliceLayout(1, by_values))
            cells.store((acc / gl.expand_dims(whole_weight, 1)).to(keys.dtype))
            gl.store(out_ptr + out_offsets + gl.expand_dims(column, 0), cells.load(by_rows), mask=is_query)
        elif CHUNKS == 0:
            nothing = gl.zeros([ROWS, HEAD_DIM], keys.dtype, layout=by_rows)
            gl.store(out_ptr + out_offsets + gl.expand_dims(column, 0), nothing, mask=is_query)
        index += gl.num_programs(1)


@gluon_jit_once_for(
    "num_chunks", "window", "max_blocks", "table_stride", "table_ptr", "first_ptr", "length_ptr", "start_ptr"
)  # fmt: skip
def _streamed_attention_kernel(
    k_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    v_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    query_ptr: gl.tensor,
    table_ptr: gl.tensor,
    first_ptr: gl.tensor,
    length_ptr: gl.tensor,
    start_ptr: gl.tensor,
    out_ptr: gl.tensor,
    num_chunks: gl.tensor,
    window: gl.tensor,
    max_blocks: gl.tensor,
    scale: gl.tensor,
    query_token_stride: gl.tensor,
    query_head_stride: gl.tensor,
    table_stride: gl.tensor,
    out_token_stride: gl.tensor,
    out_head_stride: gl.tensor,
    GQA_GROUP_SIZE: gl.constexpr,
    PACKED: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CHUNKS: gl.constexpr,
    QUERIES: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """One program PACKED heads, which share their keys, and QUERIES queries of a chunk, several where there are many short
    chunks; the last queries, which see most keys, start first."""
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    barrier: gl.constexpr = hopper.mbarrier.MBarrierLayout()
    cells = gl.allocate_shared_memory(k_desc.dtype, [2, QUERIES * PACKED // 2, HEAD_DIM], shared)
    keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], shared)
    values = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, HEAD_DIM], shared)
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
    head = gl.program_id(0) * PACKED
    limit = max_blocks * BLOCK_SIZE
    gl.warp_specialize(
        [
            (_attend, (
                cells.index(0), ring, cleared, query, out, chunks, limit, scale, head,
                0, PACKED, CHUNKS, QUERIES, TILE, STAGES,
            )),
            (_attend, (
                cells.index(1), ring, cleared, query, out, chunks, limit, scale, head,
                1, PACKED, CHUNKS, QUERIES, TILE, STAGES,
            )),
            (copy_tiles, (
                k_desc, v_desc, ring, table_ptr, table_stride, max_blocks, chunks, head // GQA_GROUP_SIZE,
                BLOCK_SIZE, PIECE, CHUNKS, QUERIES, TILE, STAGES,
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


def streams_attention(query: torch.Tensor, *caches: torch.Tensor) -> bool:
    """Whether `streamed_attention` takes these: the device, types, head's size, and that the caches can be copied in bulk."""
    if not has_bulk_copies(query):
        return False
    block_size = caches[0].shape[1]
    has_shape = query.shape[-1] in _HEAD_DIMS and block_size >= 8 and block_size & (block_size - 1) == 0
    return (
        has_shape
        and query.dtype in _TYPES
        and all(
            cache.dtype == query.dtype
            and cache.data_ptr() % 16 == 0
            and all(stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:3])
            for cache in caches
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
    scale: float,
    out: torch.Tensor,  # [tokens, q_heads, head_dim], written
    *,
    spare_tiles: int,
) -> None:
    """spare_tiles: the number of chunks that may end within a tile of queries before a program has to take two."""
    num_chunks = len(block_table)
    _launch(
        query, (key_cache, value_cache, block_table), (first_tokens, lengths, start_positions), scale, out,
        num_programs=len(query) // _queries_of(query, key_cache) + min(num_chunks, spare_tiles),
        most_chunks=power_of_two(num_chunks),
    )  # fmt: skip


def streamed_windows(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim], the rows one behind the other
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    scale: float,
    out: torch.Tensor,  # [rows, window, q_heads, head_dim], likewise, written
) -> None:
    """Chunks of one length. A query that sees no key gets zeros."""
    rows, window = query.shape[:2]
    _launch(
        query.flatten(0, 1), (key_cache, value_cache, block_table), (start_positions,) * 3, scale, out.flatten(0, 1),
        num_programs=rows * blocks_of(window, _queries_of(query[0], key_cache)), window=window,
    )  # fmt: skip


def _queries_of(query: torch.Tensor, key_cache: torch.Tensor) -> int:
    """Returns the number of queries of a program."""
    return ROWS // packed_heads(query.shape[1] // key_cache.shape[2])


def _launch(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    paged: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # keys, values, block table
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # first tokens, lengths, start positions
    scale: float,
    out: torch.Tensor,  # [tokens, q_heads, head_dim], written
    *,
    num_programs: int,
    window: int = 0,
    most_chunks: int = 0,
) -> None:
    """num_programs: of the heads that are computed together. window: of each chunk, where only their start positions are looked
    at; else most_chunks, a power of two."""
    key_cache, value_cache, block_table = paged
    q_heads, head_dim = query.shape[1:]
    num_chunks, max_blocks = block_table.shape
    block_size = key_cache.shape[1]
    gqa_group_size = q_heads // key_cache.shape[2]
    packed = packed_heads(gqa_group_size)
    box = [1, min(block_size, TILE), 1, _PIECE]
    layout = gl.NVMMASharedLayout(128, 16, rank=len(box))
    descriptors = (
        TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, layout)
        for cache in (key_cache, value_cache)
    )
    _streamed_attention_kernel[(q_heads // packed, num_programs)](
        *descriptors, query, block_table, *chunks, out, num_chunks, window, max_blocks,
        scale * LOG2_E, *query.stride()[:2], block_table.stride(0), *out.stride()[:2],
        GQA_GROUP_SIZE=gqa_group_size, PACKED=packed, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        CHUNKS=most_chunks, QUERIES=ROWS // packed, TILE=TILE, PIECE=_PIECE, STAGES=_STAGES,
        REGISTERS=_REGISTERS, num_warps=4, **_OPTIONS,
    )  # fmt: skip
