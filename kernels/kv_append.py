"""Writes new keys and values to their slots of the paged cache."""

from __future__ import annotations

import torch

from headway.kernels.reference.kv_append import kv_append as kv_append_twin


def kv_append(
    key: torch.Tensor,  # [tokens, kv_heads, head_dim]
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
) -> None:
    """No cell is touched but the slots named."""
    kv_append_twin(key, value, key_cache, value_cache, slot_mapping)
