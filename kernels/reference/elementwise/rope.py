"""Rotary position embedding, half-split: dimension i turns with dimension i + head_dim / 2 (PyTorch twin)."""

from __future__ import annotations

import torch


def rope(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32 or float64: cosines, then sines
) -> None:
    """Computed in the table's dtype, rounded once."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for heads in (query, key):
        first, second = heads.chunk(2, dim=-1)
        if heads.dtype == cos.dtype:
            crossed = first * sin
            first.mul_(cos).addcmul_(second, sin, value=-1)
            second.mul_(cos).add_(crossed)
        else:
            turned = first * cos - second * sin
            second.copy_(second * cos + first * sin)
            first.copy_(turned)
