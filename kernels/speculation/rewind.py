"""Takes back the tokens of a window that verification rejected."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.reference.speculation.rewind import rewind_kv_cache as rewind_kv_cache_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, jit, takes_triton, tl

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
    """One lane a row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if ACTIVE_IS_POINTER:
        active = tl.load(active)
    is_row = row < num_rows
    is_active = is_row & (row < active)
    can_rewind = is_active & (tl.load(prefill_ptr + row, mask=is_active, other=1) == 0)
    accepted = tl.load(accepted_ptr + row, mask=can_rewind, other=DEPTH).to(tl.int64)
    rewound = tl.where(can_rewind, DEPTH - accepted, 0)

    length = tl.load(length_ptr + row, mask=can_rewind, other=0)
    tl.store(length_ptr + row, length - rewound, mask=can_rewind)
    remainder = tl.load(offset_ptr + row, mask=can_rewind, other=0) - rewound
    falls_back = can_rewind & (remainder < 0)
    tl.store(offset_ptr + row, tl.where(falls_back, remainder + BLOCK_SIZE, remainder), mask=can_rewind)

    count = tl.load(count_ptr + row, mask=falls_back, other=1).to(tl.int64) - 1
    tl.store(count_ptr + row, count, mask=falls_back)
    last_id = tl.load(last_id_ptr + row, mask=is_active, other=0)
    entry_ptr = table_ptr + row * row_stride + count * column_stride
    tl.store(entry_ptr, -1, mask=falls_back & (count < max_blocks))
    has_previous = falls_back & (count > 0)
    previous = tl.load(entry_ptr - column_stride, mask=has_previous, other=-1)
    tl.store(last_id_ptr + row, previous, mask=falls_back)
    tl.store(release_ptr + row, last_id, mask=is_row)
    tl.store(remove_ptr + row, falls_back, mask=is_row)


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
    """Every vector may be [N] or [1, N]. Returns (blocks_to_release [N], remove_mask [N] bool)."""
    if takes_triton(kv_block_ids):
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
    return rewind_kv_cache_twin(
        accepted_counts,
        prefill_status,
        last_kv_block_offset,
        kv_length_offsets,
        kv_block_counts,
        last_kv_block_id,
        kv_block_ids,
        num_speculative_tokens,
        block_size_tokens,
        num_active_requests,
        out=out,
    )
