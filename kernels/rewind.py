"""Takes back the tokens of a window that verification rejected."""

from __future__ import annotations

import torch

from headway.kernels.reference.rewind import rewind_kv_cache as rewind_kv_cache_twin


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
