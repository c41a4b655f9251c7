"""Builds the inputs of one pass of the MTP layer over each row's newest pairs, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.open_drafts import open_drafts as open_drafts_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import slot_or_none
from headway.kernels.types._row_state import DraftWindow, RowState

_ROWS, _WARPS = 32, 1


@jit
def _open_drafts_kernel(
    length_ptr: tl.tensor,
    limit_ptr: tl.tensor,
    granted_ptr: tl.tensor,
    given_ptr: tl.tensor,
    given_count_ptr: tl.tensor,
    token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    start_ptr: tl.tensor,
    end_ptr: tl.tensor,
    last_place_ptr: tl.tensor,
    next_position_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    granted_stride: tl.tensor,
    given_stride: tl.tensor,
    given_place_stride: tl.tensor,
    AHEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
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
    count = tl.full((ROWS,), WIDTH, tl.int64)
    if HAS_COUNTS:
        count = tl.load(given_count_ptr + row, mask=is_live, other=0)
    count = tl.where(is_live, count, 0)
    end = tl.where(is_live, length + AHEAD, 0)
    start = tl.where(is_live, tl.maximum(end - count + 1, 0), 0)
    for place in tl.static_range(WIDTH):
        position = start + place
        is_valid = (place < count) & (position < limit)
        column = position // BLOCK_SIZE
        block_at = granted_ptr + row * granted_stride + column
        block = tl.load(block_at, mask=is_valid & (column < max_blocks), other=-1)
        token = tl.load(given_ptr + row * given_stride + place * given_place_stride, mask=is_valid, other=0)
        cell = row * WIDTH + place
        tl.store(token_ptr + cell, token, mask=is_row)
        tl.store(position_ptr + cell, tl.where(is_valid, position, 0), mask=is_row)
        tl.store(slot_ptr + cell, slot_or_none(is_valid, block, position, BLOCK_SIZE), mask=is_row)
    tl.store(start_ptr + row, start, mask=is_row)
    tl.store(end_ptr + row, tl.where(is_live, tl.minimum(end + 1, limit), 0), mask=is_row)
    tl.store(last_place_ptr + row, row * WIDTH + tl.maximum(count - 1, 0), mask=is_row)
    tl.store(next_position_ptr + row, end + 1, mask=is_row)


@falls_back_to(open_drafts_twin)
def open_drafts(
    rows: RowState,
    token_ids: torch.Tensor,  # [N, W] int64
    counts: torch.Tensor | None,  # [N] int64, 1 .. W: tokens of each row; None: W
    ahead: int,
    block_size_tokens: int,
    *,
    out: DraftWindow | None = None,
) -> DraftWindow:
    """Returns the window of each row's tokens, which end at position L + ahead, L = kv_lengths. Tokens from
    the row's limit on are not valid."""
    num_rows, width = token_ids.shape
    window = DraftWindow.empty(num_rows, width, token_ids.device) if out is None else out
    given_counts = rows.kv_lengths if counts is None else counts
    opened = tuple(getattr(window, name) for name in DraftWindow.__slots__)
    check_dense(rows.kv_lengths, rows.limits, given_counts, *opened)
    table = rows.granted_block_ids
    assert table.stride(1) == 1, "block ids of a row are adjacent"
    if num_rows > 0:
        overlaps, launch = overlap(token_ids.device)
        _open_drafts_kernel[(blocks_of(num_rows, _ROWS),)](
            rows.kv_lengths, rows.limits, table, token_ids, given_counts, *opened,
            num_rows, table.shape[1], table.stride(0), *token_ids.stride(),
            AHEAD=ahead, WIDTH=width, HAS_COUNTS=counts is not None, BLOCK_SIZE=block_size_tokens,
            ROWS=_ROWS, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
        )  # fmt: skip
    return window
