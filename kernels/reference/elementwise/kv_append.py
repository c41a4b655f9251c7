"""Writes new keys and values to their slots of the paged cache (PyTorch twin)."""

from __future__ import annotations

import torch


def kv_append(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
) -> None:
    """Writes the slots named and touches no other cell."""
    if slot_mapping.numel() > 0 and int(slot_mapping.min()) < 0:
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slot_mapping = slot_mapping.index_select(0, tokens)
        key, value = key.index_select(0, tokens), value.index_select(0, tokens)
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)
