"""Norm and rotary position embedding of queries and keys, and the keys and values to the paged cache (PyTorch
twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.kv_append import kv_append
from headway.kernels.reference.elementwise.rms_norm import rms_norm
from headway.kernels.reference.elementwise.rope import rope
from headway.kernels.types._head_norms import HeadNorms


def rope_append(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    value: torch.Tensor,  # [tokens, kv_heads, head_dim]
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, rotary_dim] float32 or float64: cosines, then sines
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    *,
    norms: HeadNorms | None = None,
) -> None:
    """Computes `rms_norm` of each head, then `rope` of the first rotary_dim dimensions, then `kv_append`."""
    if norms is not None:
        for heads, weight in ((query, norms.query), (key, norms.key)):
            heads.copy_(rms_norm(heads, weight, norms.epsilon, unit_offset=norms.unit_offset))
    rotary_dim = cos_sin.shape[1]
    rope(query[..., :rotary_dim], key[..., :rotary_dim], positions, cos_sin)
    kv_append(key, value, key_cache, value_cache, slot_mapping)
