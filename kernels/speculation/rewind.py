"""Rewinds the KV cache bookkeeping past rejected draft tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.reference.speculation.rewind import rewind_kv_cache as rewind_kv_cache_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import rewind_row

_ROWS = 128


@jit
def _rewind_kernel(
    accepted_ptr: tl.tensor,
    prefill_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    length_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    table_ptr: tl.tensor,
    release_ptr: tl.tensor,
    remove_ptr: tl.tensor,
    active: tl.tensor,
    num_rows: tl.tensor,
    max_blocks: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVE_IS_POINTER: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if ACTIVE_IS_POINTER:
        active = tl.load(active)
    is_row = row < num_rows
    is_active = is_row & (row < active)
    can_rewind = is_active & (tl.load(prefill_ptr + row, mask=is_active, other=1) == 0)
    accepted = tl.load(accepted_ptr + row, mask=can_rewind, other=DEPTH).to(tl.int64)
    length = tl.load(length_ptr + row, mask=can_rewind, other=0)
    offset = tl.load(offset_ptr + row, mask=can_rewind, other=0)
    last_id = tl.load(last_id_ptr + row, mask=is_active, other=0)
    falls_back = rewind_row(
        row, length, offset, accepted, can_rewind, length_ptr, offset_ptr, count_ptr, last_id_ptr,
        table_ptr, row_stride, column_stride, max_blocks, DEPTH, BLOCK_SIZE,
    )  # fmt: skip
    tl.store(release_ptr + row, last_id, mask=is_row)
    tl.store(remove_ptr + row, falls_back, mask=is_row)


@falls_back_to(rewind_kv_cache_twin)
def rewind_kv_cache(
    accepted_counts: torch.Tensor,  # [N] integer
    prefill_status: torch.Tensor,  # [N] integer, 1: prefill row, nothing to rewind
    last_kv_block_offset: torch.Tensor,  # [N] integer, in place
    kv_length_offsets: torch.Tensor,  # [N] integer, in place
    kv_block_counts: torch.Tensor,  # [N] integer, in place
    last_kv_block_id: torch.Tensor,  # [N] integer, in place
    kv_block_ids: torch.Tensor,  # [N, max_blocks] integer, in place
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Removes rejected tokens from the rows. Returns (blocks_to_release [N], remove_mask [N] bool). Every
    vector may be [N] or [1, N]. The twin shows an example."""
    check_window(num_speculative_tokens, block_size_tokens)
    check_dense(accepted_counts, prefill_status, last_kv_block_offset, kv_length_offsets)
    check_dense(kv_block_counts, last_kv_block_id)
    rows, max_blocks = kv_block_ids.shape
    if out is None:
        removed = torch.empty(rows, dtype=torch.bool, device=kv_block_ids.device)
        out = torch.empty_like(last_kv_block_id.view(-1)), removed
    if rows > 0:
        _rewind_kernel[(blocks_of(rows, _ROWS),)](
            accepted_counts, prefill_status, last_kv_block_offset, kv_length_offsets, kv_block_counts,
            last_kv_block_id, kv_block_ids, *out,
            rows if num_active_requests is None else num_active_requests,
            rows, max_blocks, *kv_block_ids.stride(),
            DEPTH=num_speculative_tokens, BLOCK_SIZE=block_size_tokens,
            ACTIVE_IS_POINTER=isinstance(num_active_requests, torch.Tensor), ROWS=_ROWS,
        )  # fmt: skip
    return out
