"""Counts the whole window into each live row before the forward pass and gives the row its blocks."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.reference.speculation.advance import advance as advance_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, takes_triton, tl
from headway.kernels.speculation._device_functions import advance_row

_ROWS = 128


@jit
def _advance_kernel(
    length_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    granted_ptr: tl.tensor,
    limit_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    active: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    granted_row_stride: tl.tensor,
    granted_column_stride: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVE_IS_POINTER: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if ACTIVE_IS_POINTER:
        active = tl.load(active)
    is_active = (row < num_rows) & (row < active)
    length = tl.load(length_ptr + row, mask=is_active, other=0).to(tl.int64)
    is_live = is_active & (length < tl.load(limit_ptr + row, mask=is_active, other=0))
    tl.store(prefill_ptr + row, tl.where(is_live, 0, 1), mask=is_active)

    advance_row(
        row, length, is_live, length_ptr, offset_ptr, count_ptr, last_id_ptr, table_ptr, row_stride, column_stride,
        granted_ptr, granted_row_stride, granted_column_stride, max_blocks, DEPTH, BLOCK_SIZE,
    )  # fmt: skip


def advance(
    kv_length_offsets: torch.Tensor,  # [N] integer, in place: tokens in the cache
    last_kv_block_offset: torch.Tensor,  # [N] integer, in place: the last token's offset in its block
    kv_block_counts: torch.Tensor,  # [N] integer, in place
    last_kv_block_id: torch.Tensor,  # [N] integer, in place
    kv_block_ids: torch.Tensor,  # [N, max_blocks] integer, in place: blocks in use, then -1
    granted_block_ids: torch.Tensor,  # [N, max_blocks] integer: blocks that may be used, then -1
    limits: torch.Tensor,  # [N] integer: rows this long or longer are padding
    prefill_status: torch.Tensor,  # [N] integer, written: 1 for padding, else 0
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None = None,
) -> None:
    """Block size 4, S = 3: a row of 6 tokens becomes one of 10 and takes its third block."""
    if takes_triton(kv_block_ids):
        check_window(num_speculative_tokens, block_size_tokens)
        check_dense(kv_length_offsets, last_kv_block_offset, kv_block_counts, last_kv_block_id)
        check_dense(limits, prefill_status)
        rows, max_blocks = kv_block_ids.shape
        if rows > 0:
            _advance_kernel[(blocks_of(rows, _ROWS),)](
                kv_length_offsets, last_kv_block_offset, kv_block_counts, last_kv_block_id, kv_block_ids,
                granted_block_ids, limits, prefill_status,
                rows if num_active_requests is None else num_active_requests,
                rows, max_blocks, *kv_block_ids.stride(), *granted_block_ids.stride(),
                DEPTH=num_speculative_tokens, BLOCK_SIZE=block_size_tokens,
                ACTIVE_IS_POINTER=isinstance(num_active_requests, torch.Tensor), ROWS=_ROWS,
            )  # fmt: skip
        return
    advance_twin(
        kv_length_offsets,
        last_kv_block_offset,
        kv_block_counts,
        last_kv_block_id,
        kv_block_ids,
        granted_block_ids,
        limits,
        prefill_status,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
    )
