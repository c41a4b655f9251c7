"""Writes token ids to their slots of a paged token cache (PyTorch twin)."""

from __future__ import annotations

import torch


def store_tokens(
    token_ids: torch.Tensor,  # [tokens] int64
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    token_cache: torch.Tensor,  # [num_blocks, block_size] int32, written
) -> None:
    """Writes each token id to its slot; other slots are not changed."""
    is_kept = slot_mapping >= 0
    token_cache.view(-1)[slot_mapping[is_kept]] = token_ids[is_kept].to(token_cache.dtype)
