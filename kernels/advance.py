"""Counts the whole window into each live row before the forward pass and hands it its blocks."""

from __future__ import annotations

import torch

from headway.kernels.reference.advance import advance as advance_twin


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
