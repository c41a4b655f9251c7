"""RMSNorm and rotary position embedding (RoPE) of queries and keys, and the keys and values to the paged KV
cache (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.rms_norm import rms_norm
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
    """Norms each head if norms are given, rotates its first rotary_dim dimensions, dimension i with dimension
    i + rotary_dim / 2, and writes keys and values to their slots of the cache."""
    if norms is not None:
        for heads, weight in ((query, norms.query), (key, norms.key)):
            heads.copy_(rms_norm(heads, weight, norms.epsilon, unit_offset=norms.unit_offset))
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for heads in (query, key):
        _turn(heads[..., : cos_sin.shape[1]], cos, sin)
    _append(key, value, key_cache, value_cache, slot_mapping)


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the heads in place, in the table's dtype, and rounds once."""
    first, second = heads.chunk(2, dim=-1)
    if heads.dtype == cos.dtype:
        crossed = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(crossed)
    else:
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)


def _append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Writes keys and values to their slots; other slots stay as they are."""
    if slot_mapping.numel() > 0 and int(slot_mapping.min()) < 0:
        tokens = (slot_mapping >= 0).nonzero()[:, 0]
        slot_mapping = slot_mapping.index_select(0, tokens)
        key, value = key.index_select(0, tokens), value.index_select(0, tokens)
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)
