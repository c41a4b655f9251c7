"""The projection to queries, keys and values, rotary embedding, and the KV cache (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.rope_append import rope_append
from headway.kernels.types._deferred_norm import DeferredNorm


def qkv_rope_append(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [(q_heads + 2 * kv_heads) * head_dim, hidden] float: queries', keys', values'
    bias: torch.Tensor | None,  # [(q_heads + 2 * kv_heads) * head_dim] float
    norm: DeferredNorm | None,  # of x; None: x is normed
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32: cosines, then sines
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim], written
    slot_mapping: torch.Tensor,  # [tokens] int64: block id * block size + offset; -1: not written
    *,
    is_ordered: bool = False,
) -> torch.Tensor:
    """Returns the rotated queries, [tokens, q_heads, head_dim]. is_ordered has no effect, because the library
    multiplies here."""
    kv_heads, head_dim = key_cache.shape[2:]
    product = torch.nn.functional.linear(x, weight)
    if norm is not None:
        product = (product * norm.factor(x.shape[1])).to(x.dtype)
    product = product if bias is None else product + bias
    heads = product.view(len(x), -1, head_dim)
    query, key, value = heads.tensor_split((heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads), dim=1)
    rope_append(query, key, value, positions, cos_sin, key_cache, value_cache, slot_mapping)
    return query
