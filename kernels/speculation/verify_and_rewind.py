"""Verifies a round's drafts and advances its rows: verify, prepare and rewind in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.reference.speculation.verify_and_rewind import (
    verify_and_rewind as verify_and_rewind_twin,
)
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import (
    accepts_draft,
    count_accepted,
    rewind_row,
    token_or_none,
)
from headway.kernels.types._row_state import RoundWindow, RowState

_ROWS, _WARPS = 32, 1


@jit
def _commit_kernel(
    token_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    picked_ptr: tl.tensor,
    broken_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    pending_count_ptr: tl.tensor,
    emitted_ptr: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    table_stride: tl.tensor,
    pending_stride: tl.tensor,
    pending_places: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_BROKEN: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One lane per row."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    is_live = is_row & (tl.load(prefill_ptr + row, mask=is_row, other=1) == 0)
    length = tl.load(length_ptr + row, mask=is_live, other=0)
    offset = tl.load(offset_ptr + row, mask=is_live, other=0)

    first = row * (DEPTH + 1)
    emitted_at = emitted_ptr + row * (DEPTH + 2)
    is_accepted = is_live
    accepted = tl.zeros((ROWS,), tl.int64)
    picked = tl.load(picked_ptr + first, mask=is_row, other=0)
    bonus = picked
    # A round without drafts has consumed no pending pair, so that its own is appended.
    first_pending = tl.zeros((ROWS,), tl.int64)
    if DEPTH == 0:
        num_pending = tl.load(pending_count_ptr + row, mask=is_live, other=0)
        first_pending = tl.minimum(num_pending, pending_places - 1)
    for place in tl.static_range(DEPTH + 1):
        if place > 0:
            draft = tl.load(token_ptr + first + place, mask=is_row, other=0)
            is_valid = tl.load(valid_ptr + first + place, mask=is_row, other=0) != 0
            is_accepted = accepts_draft(is_accepted, token_or_none(is_valid, draft), picked)
            accepted = count_accepted(accepted, is_accepted)
            picked = tl.load(picked_ptr + first + place, mask=is_row, other=0)
            bonus = tl.where(is_accepted, picked, bonus)
        told = picked
        if HAS_BROKEN:
            is_broken = tl.load(broken_ptr + first + place, mask=is_row, other=0) != 0
            told = token_or_none(is_broken == 0, picked)
        tl.store(emitted_at + place + 1, told, mask=is_row)
        pending_at = pending_ptr + row * pending_stride + first_pending + place
        tl.store(pending_at, picked, mask=is_live)
    tl.store(emitted_at, tl.where(is_live, accepted + 1, 0), mask=is_row)
    tl.store(last_token_ptr + row, bonus, mask=is_live)
    tl.store(pending_count_ptr + row, first_pending + accepted + 1, mask=is_live)

    rewind_row(
        row, length, offset, accepted, is_live, length_ptr, offset_ptr, count_ptr, last_id_ptr,
        table_ptr, table_stride, 1, max_blocks, DEPTH, BLOCK_SIZE,
    )  # fmt: skip


@falls_back_to(verify_and_rewind_twin)
def verify_and_rewind(
    rows: RowState,  # as `prepare_verify_inputs` left it; all but limits, depth_caps, grants and prefill_status in place
    window: RoundWindow,
    sampled: torch.Tensor,  # [N, S + 1] int64: what the target chose after each token of the window
    block_size_tokens: int,
    *,
    broken: torch.Tensor | None = None,  # [N, S + 1] bool: as `sample` writes it
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [N, S + 2] int64: the number of sampled tokens that stay (0 for padding), then all of them, -1
    where they are broken. The twin explains the changes of the rows."""
    num_rows, width = sampled.shape
    check_window(width - 1, block_size_tokens)
    emitted = (
        torch.empty((num_rows, width + 1), dtype=torch.int64, device=sampled.device) if out is None else out
    )
    numbers = rows.prefill_status, rows.last_tokens, rows.kv_lengths
    places = rows.last_block_offsets, rows.block_counts, rows.last_block_ids
    given = window.token_ids, window.is_valid, sampled, sampled if broken is None else broken
    check_dense(*given, *numbers, *places, rows.pending_counts, emitted)
    table, pending = rows.kv_block_ids, rows.pending_tokens
    assert table.stride(1) == pending.stride(1) == 1, (table.stride(), pending.stride())
    assert pending.shape[1] >= width, (tuple(pending.shape), width)
    if num_rows > 0:
        overlaps, launch = overlap(sampled.device)
        _commit_kernel[(blocks_of(num_rows, _ROWS),)](
            *given, *numbers, *places, table, pending, rows.pending_counts, emitted, num_rows,
            table.shape[1], table.stride(0), pending.stride(0), pending.shape[1],
            DEPTH=width - 1, BLOCK_SIZE=block_size_tokens, HAS_BROKEN=broken is not None, ROWS=_ROWS, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
        )  # fmt: skip
    return emitted
