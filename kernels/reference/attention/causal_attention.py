"""Causal attention of windows over their own keys (PyTorch twin)."""

from __future__ import annotations

import torch


def causal_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key: torch.Tensor,  # [rows, window, kv_heads, head_dim]
    value: torch.Tensor,  # [rows, window, kv_heads, head_dim]
    scale: float,
) -> torch.Tensor:
    """[rows, window, q_heads, head_dim], contiguous: query w of a row sees keys 0 .. w of its row."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous()
