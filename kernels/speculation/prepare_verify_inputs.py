"""Builds the target's inputs for K + 1 tokens per row and advances the lengths, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.reference.speculation.prepare_verify_inputs import (
    prepare_verify_inputs as prepare_verify_inputs_twin,
)
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import slot_or_none
from headway.kernels.types._row_state import RoundWindow, RowState

_ROWS, _WARPS = 32, 1


@jit
def _open_kernel(
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    limit_ptr: tl.tensor,
    cap_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    granted_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    next_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    table_stride: tl.tensor,
    granted_stride: tl.tensor,
    draft_stride: tl.tensor,
    draft_place_stride: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One lane per row."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    length = tl.load(length_ptr + row, mask=is_row, other=0)
    limit = tl.load(limit_ptr + row, mask=is_row, other=0)
    is_live = is_row & (length < limit)
    room = tl.minimum(limit - length, tl.load(cap_ptr + row, mask=is_row, other=0) + 1)
    tl.store(prefill_ptr + row, tl.where(is_live, 0, 1), mask=is_row)
    tl.store(start_ptr + row, tl.where(is_live, length, 0), mask=is_row)
    tl.store(next_ptr + row, tl.where(is_live, length, 0) + 1, mask=is_row)
    tl.store(end_ptr + row, tl.where(is_live, length + tl.minimum(room, DEPTH + 1), 0), mask=is_row)

    # A window crosses at most one block boundary, because DEPTH < BLOCK_SIZE: two blocks hold all of it.
    first_column = length // BLOCK_SIZE
    last_column = (length + DEPTH) // BLOCK_SIZE
    blocks_ptr = granted_ptr + row * granted_stride
    first_block = tl.load(blocks_ptr + first_column, mask=is_live & (first_column < max_blocks), other=-1)
    last_block = tl.load(blocks_ptr + last_column, mask=is_live & (last_column < max_blocks), other=-1)
    token = tl.load(last_token_ptr + row, mask=is_row, other=0)
    for place in tl.static_range(DEPTH + 1):
        if place > 0:
            draft_at = draft_ptr + row * draft_stride + (place - 1) * draft_place_stride
            token = tl.load(draft_at, mask=is_row, other=0)
        position = length + place
        is_valid = is_row & (place < room)
        block = tl.where(position // BLOCK_SIZE == first_column, first_block, last_block)
        cell = row * (DEPTH + 1) + place
        tl.store(token_ptr + cell, tl.where(is_valid, token, 0), mask=is_row)
        tl.store(position_ptr + cell, tl.where(is_valid, position, 0), mask=is_row)
        tl.store(slot_ptr + cell, slot_or_none(is_valid, block, position, BLOCK_SIZE), mask=is_row)
        tl.store(valid_ptr + cell, is_valid, mask=is_row)

    _advance_row(
        row, length, is_live, length_ptr, offset_ptr, count_ptr, last_id_ptr, table_ptr, table_stride,
        granted_ptr, granted_stride, max_blocks, DEPTH, BLOCK_SIZE,
    )  # fmt: skip


@jit
def _advance_row(
    row: tl.tensor,
    length: tl.tensor,
    is_live: tl.tensor,
    length_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    table_stride: tl.tensor,
    granted_ptr: tl.tensor,
    granted_stride: tl.tensor,
    max_blocks: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Adds the DEPTH + 1 tokens of a window to the lengths of live rows and allocates the granted block that
    they reach."""
    new_length = length + DEPTH + 1
    tl.store(length_ptr + row, new_length, mask=is_live)
    tl.store(offset_ptr + row, (new_length - 1) % BLOCK_SIZE, mask=is_live)
    count = tl.load(count_ptr + row, mask=is_live, other=0)
    new_count = (length + DEPTH) // BLOCK_SIZE + 1
    # A window takes at most one block, because DEPTH < BLOCK_SIZE: the one at the old count.
    takes_block = is_live & (new_count > count)
    is_inside = takes_block & (count < max_blocks)
    granted_ptr += row * granted_stride + count
    granted = tl.load(granted_ptr, mask=is_inside, other=-1)
    tl.store(table_ptr + row * table_stride + count, granted, mask=is_inside)
    tl.store(last_id_ptr + row, granted, mask=takes_block)
    tl.store(count_ptr + row, new_count, mask=takes_block)


@falls_back_to(prepare_verify_inputs_twin)
def prepare_verify_inputs(
    rows: RowState,  # lengths, blocks and prefill_status in place
    drafts: torch.Tensor,  # [N, S] int64
    block_size_tokens: int,
    *,
    out: RoundWindow | None = None,
) -> RoundWindow:
    """Returns the window [t_L, d_1 .. d_S] of each row, and adds its tokens to the lengths of live rows. A
    draft beyond the row's limit or depth cap is not valid."""
    num_rows, depth = drafts.shape
    check_window(depth, block_size_tokens)
    window = RoundWindow.empty(num_rows, depth, drafts.device) if out is None else out
    vectors = rows.last_tokens, rows.kv_lengths, rows.limits, rows.depth_caps
    places = rows.last_block_offsets, rows.block_counts, rows.last_block_ids
    opened = tuple(getattr(window, name) for name in RoundWindow.__slots__)
    check_dense(*vectors, *places, rows.prefill_status, *opened)
    tables = rows.kv_block_ids, rows.granted_block_ids
    assert all(table.stride(1) == 1 for table in tables), "block ids of a row are adjacent"
    if num_rows > 0:
        overlaps, launch = overlap(drafts.device)
        _open_kernel[(blocks_of(num_rows, _ROWS),)](
            *vectors, *places, *tables, rows.prefill_status, drafts, *opened,
            num_rows, tables[0].shape[1], tables[0].stride(0), tables[1].stride(0), *drafts.stride(),
            DEPTH=depth, BLOCK_SIZE=block_size_tokens, ROWS=_ROWS, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
        )  # fmt: skip
    return window
