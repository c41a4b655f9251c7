"""The projection to queries, keys and values with a fused epilogue: rotary embedding, and the keys and values
to the KV cache."""

from __future__ import annotations

import torch

from headway.kernels.linear._hopper_core import (
    by_rows,
    choice_of,
    close_stream,
    described_pairs,
    described_rows,
    inputs_of,
    open_stream,
    rows_of,
    split_paired,
    stream_constants_of,
    sum_stream,
    sums_of,
)
from headway.kernels.linear._skinny_core import (
    constants_of,
    cut_of,
    deferred_factor,
    first_weights,
    is_second,
    load_squares,
    pair_of,
    reduce_split_k,
    split_pairs,
    sum_products,
    workspace_of,
)
from headway.kernels.linear.dispatch import PAIRED, FusedOperation, LinearKernel, WeightFormat
from headway.kernels.reference.linear.qkv_rope_append import qkv_rope_append as qkv_rope_append_twin
from headway.kernels.runtime._triton import check_dense, gl, gluon_jit_once_for, jit, jit_once_for, tl
from headway.kernels.types._deferred_norm import DeferredNorm

# The pairs of dimensions that one program rotates: in a head of 128 the second program rotates 32 .. 63 with
# 96 .. 127.
_PAIRS = 32


@jit_once_for("num_rows")
def _qkv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    position_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    x_stride: tl.tensor,
    q_heads: tl.tensor,
    kv_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    CUT: tl.constexpr,
    TILES: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    DEPENDENTS_AT: tl.constexpr,
    FETCHES_AHEAD: tl.constexpr,
) -> None:
    """Each program computes OUTPUTS / 2 pairs of a head over one of SPLIT parts of the inputs (split-K)."""
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    PAIRS: tl.constexpr = OUTPUTS // 2
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tile // (HALF // PAIRS)
    first_dim = tile % (HALF // PAIRS) * PAIRS
    place, row = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    dim = first_dim + tl.arange(0, PAIRS)
    is_row = row < num_rows
    weight_row = head * HEAD_DIM + first_dim + pair_of(place) + tl.where(is_second(place), HALF, 0)
    weights_ptr = first_weights(weight_ptr, weight_row, num_inputs, part, SPLIT, CUT, FETCHES_AHEAD)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
    # With a deferred norm the preceding kernel is `add_linear`, which launches its dependents after its own
    # wait. Positions and slots were written before that kernel, so that they can be read now, from the L2
    # cache. Without one the preceding kernel is `rms_norm`, which launches its dependents before it waits.
    if OVERLAPS and TILES == 0:
        tl.extra.cuda.gdc_wait()
    position = tl.load(position_ptr + row, mask=is_row, other=0, cache_modifier=".cg")
    slot = tl.load(slot_ptr + row, mask=is_row, other=-1, cache_modifier=".cg")
    turn_ptr = table_ptr + position[None, :] * HEAD_DIM + dim[:, None]
    is_turned = is_row[None, :] & (head < q_heads + kv_heads)
    cos = tl.load(turn_ptr, mask=is_turned, other=1.0)
    sin = tl.load(turn_ptr + HALF, mask=is_turned, other=0.0)
    if OVERLAPS and TILES > 0:
        tl.extra.cuda.gdc_wait()
    if TILES > 0:
        squares = load_squares(squares_ptr, num_rows, num_inputs, ROWS, TILES)
    sums = sum_products(
        x_ptr, weights_ptr, num_rows, num_inputs, x_stride, part,
        ROWS, OUTPUTS, INPUTS, SPLIT, CUT, OVERLAPS, DEPENDENTS_AT,
    )  # fmt: skip
    sums, is_last = reduce_split_k(sums, partial_ptr, arrived_ptr, tile, part, ROWS, OUTPUTS, SPLIT)
    if is_last:
        if TILES > 0:
            sums *= deferred_factor(squares, num_inputs, EPSILON)[None, :]
        if HAS_BIAS:
            sums += bias[:, None]
        first, second = split_pairs(sums.to(query_ptr.dtype.element_ty), ROWS, OUTPUTS)
        first, second = first.to(tl.float32), second.to(tl.float32)
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        if head < q_heads:
            query_cell = query_ptr + (row * q_heads + head)[None, :] * HEAD_DIM + dim[:, None]
            _store(query_cell, turned_first, turned_second, is_row, HALF)
        else:
            is_key = head < q_heads + kv_heads
            kv_head = head - q_heads - tl.where(is_key, 0, kv_heads)
            offset = (slot * kv_heads + kv_head)[None, :] * HEAD_DIM + dim[:, None]
            if is_key:
                _store(key_cache_ptr + offset, turned_first, turned_second, is_row & (slot >= 0), HALF)
            else:
                _store(value_cache_ptr + offset, first, second, is_row & (slot >= 0), HALF)


@jit
def _store(
    cell: tl.tensor,  # [PAIRS, ROWS]: of the first halves
    first: tl.tensor,
    second: tl.tensor,
    is_written: tl.tensor,  # [ROWS]
    HALF: tl.constexpr,
) -> None:
    mask = is_written[None, :]
    tl.store(cell, first.to(cell.dtype.element_ty), mask=mask)
    tl.store(cell + HALF, second.to(cell.dtype.element_ty), mask=mask)


@gluon_jit_once_for("num_rows", "num_copies")
def _streamed_qkv_kernel(
    x_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    weight_desc: gl.nvidia.hopper.tma.tensor_descriptor,
    bias_ptr: gl.tensor,
    position_ptr: gl.tensor,
    table_ptr: gl.tensor,
    slot_ptr: gl.tensor,
    query_ptr: gl.tensor,
    key_cache_ptr: gl.tensor,
    value_cache_ptr: gl.tensor,
    num_rows: gl.tensor,
    num_copies: gl.tensor,
    q_heads: gl.tensor,
    kv_heads: gl.tensor,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    PAIRED: gl.constexpr,
    STAGES: gl.constexpr,
    STARTS: gl.constexpr,
    UNIT: gl.constexpr,
    UNDER_WAY: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Each program computes OUTPUTS / 2 pairs of a head."""
    pairs: gl.constexpr = OUTPUTS // 2
    half: gl.constexpr = HEAD_DIM // 2
    head = gl.program_id(0) // (half // pairs)
    first_dim = gl.program_id(0) % (half // pairs) * pairs
    run = first_dim // PAIRED
    stream = open_stream(
        x_desc, weight_desc, head, run, gl.program_id(0), 0, num_copies,
        ROWS, OUTPUTS, INPUTS, 1, PAIRED, STAGES, STARTS, UNIT,
    )  # fmt: skip
    first, second = split_paired(stream[-1][0], ROWS, OUTPUTS, PAIRED)
    halved: gl.constexpr = first.type.layout
    layout: gl.constexpr = by_rows(first, ROWS, pairs).type.layout
    dim = first_dim + gl.arange(0, pairs, layout=gl.SliceLayout(1, layout))
    row, is_row = rows_of(num_rows, ROWS, gl.SliceLayout(0, layout))
    # These loads are issued now and needed after the sums.
    if HAS_BIAS:
        pair = gl.arange(0, pairs, layout=gl.SliceLayout(1, halved))
        first_bias_ptr = bias_ptr + head * HEAD_DIM + first_dim + pair
        first_bias = gl.load(first_bias_ptr).to(gl.float32)
        second_bias = gl.load(first_bias_ptr + half).to(gl.float32)
    position = gl.load(position_ptr + row, mask=is_row, other=0)
    slot = gl.load(slot_ptr + row, mask=is_row, other=-1)
    turn_ptr = table_ptr + position[None, :] * HEAD_DIM + dim[:, None]
    is_turned = is_row[None, :] & (head < q_heads + kv_heads)
    cos = gl.load(turn_ptr, mask=is_turned, other=1.0)
    sin = gl.load(turn_ptr + half, mask=is_turned, other=0.0)
    stream = sum_stream(
        x_desc, weight_desc, stream, head, run, 0, num_copies, 0, num_copies,
        ROWS, OUTPUTS, INPUTS, 1, PAIRED, STAGES, UNDER_WAY,
    )  # fmt: skip
    (sums,) = sums_of(stream, 1)
    first, second = split_paired(sums, ROWS, OUTPUTS, PAIRED)
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    if HAS_BIAS:
        first += first_bias[:, None]
    first = by_rows(first.to(dtype), ROWS, pairs).to(gl.float32)
    if HAS_BIAS:
        second += second_bias[:, None]
    second = by_rows(second.to(dtype), ROWS, pairs).to(gl.float32)
    # Explicit fused operations: otherwise the compiler chooses which product it fuses, by the number of rows.
    turned_first = gl.fma(first, cos, -(second * sin))
    turned_second = gl.fma(second, cos, first * sin)
    if head < q_heads:
        cell = query_ptr + (row * q_heads + head)[None, :] * HEAD_DIM + dim[:, None]
        _store_streamed(cell, turned_first, turned_second, is_row, half)
    else:
        is_key = head < q_heads + kv_heads
        kv_head = head - q_heads - gl.where(is_key, 0, kv_heads)
        offset = (slot * kv_heads + kv_head)[None, :] * HEAD_DIM + dim[:, None]
        if is_key:
            _store_streamed(key_cache_ptr + offset, turned_first, turned_second, is_row & (slot >= 0), half)
        else:
            _store_streamed(value_cache_ptr + offset, first, second, is_row & (slot >= 0), half)
    close_stream(stream, STAGES)


@gluon_jit_once_for()
def _store_streamed(
    cell: gl.tensor,  # [PAIRS, ROWS]: of the first halves
    first: gl.tensor,
    second: gl.tensor,
    is_written: gl.tensor,  # [ROWS]
    HALF: gl.constexpr,
) -> None:
    mask = is_written[None, :]
    gl.store(cell, first.to(cell.dtype.element_ty), mask=mask)
    gl.store(cell + HALF, second.to(cell.dtype.element_ty), mask=mask)


def qkv_rope_append(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [(q_heads + 2 * kv_heads) * head_dim, hidden] float: queries', keys', values'
    bias: torch.Tensor | None,  # [(q_heads + 2 * kv_heads) * head_dim] float
    norm: DeferredNorm | None,  # of x; None: x is normed
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32: cosines, then sines
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    *,
    is_ordered: bool = False,
) -> torch.Tensor:
    """Returns the rotated queries, [tokens, q_heads, head_dim], and writes keys and values to the cache.

    The kernels are for few tokens. The product is rounded once before it is rotated. With a deferred norm,
    positions and slots must have been written before the preceding launch, because they are read before that
    has ended (PDL). is_ordered: sums have the order of `ordered_linear`.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    has_pairs = head_dim % (2 * _PAIRS) == 0
    operation = FusedOperation.QKV if norm is None else FusedOperation.QKV_DEFERRED
    weight_format = WeightFormat.ORDERED if is_ordered else WeightFormat.PLAIN
    kernel, streams = choice_of(x, weight, operation, weight_format=weight_format)
    if kernel not in (LinearKernel.TMA, LinearKernel.SKINNY) or not has_pairs:
        return qkv_rope_append_twin(
            x, weight, bias, norm, positions, cos_sin, key_cache, value_cache, slot_mapping
        )
    check_dense(positions, cos_sin, key_cache, value_cache, slot_mapping)
    if bias is not None:
        check_dense(bias)
    (tokens, num_inputs), num_outputs = x.shape, weight.shape[0]
    q_heads = num_outputs // head_dim - 2 * kv_heads
    query = torch.empty(tokens, q_heads, head_dim, dtype=x.dtype, device=x.device)
    bias_or_any = query if bias is None else bias
    if streams is not None:
        _streamed_qkv_kernel[(streams.programs,)](
            described_rows(x, streams), described_pairs(weight, streams, blocks=num_outputs // head_dim), bias_or_any, positions,
            cos_sin, slot_mapping, query, key_cache, value_cache, tokens, num_inputs // inputs_of(x, streams), q_heads, kv_heads,
            HEAD_DIM=head_dim, PAIRED=PAIRED, HAS_BIAS=bias is not None, **stream_constants_of(x, streams),
        )  # fmt: skip
        return query
    cut = cut_of(num_outputs, x)._replace(outputs=2 * _PAIRS)
    _qkv_kernel[(num_outputs // cut.outputs * cut.split,)](
        x, weight, bias_or_any, x if norm is None else norm.squares, positions, cos_sin, slot_mapping,
        query, key_cache, value_cache, *workspace_of(cut.split, x),
        tokens, num_inputs, x.stride(0), q_heads, kv_heads, HEAD_DIM=head_dim,
        TILES=0 if norm is None else norm.squares.shape[1], EPSILON=0.0 if norm is None else norm.epsilon,
        HAS_BIAS=bias is not None, **constants_of(cut, x),
    )  # fmt: skip
    return query
