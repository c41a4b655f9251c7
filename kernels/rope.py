"""Rotary position embedding, half-split: dimension i turns with dimension i + head_dim / 2."""

from __future__ import annotations

import torch

from headway.kernels.reference.rope import rope as rope_twin


def rope(
    query: torch.Tensor,  # [tokens, q_heads, head_dim], in place
    key: torch.Tensor,  # [tokens, kv_heads, head_dim], in place
    positions: torch.Tensor,  # [tokens] int64
    cos_sin: torch.Tensor,  # [max_position, head_dim] float32 or float64: cosines, then sines
) -> None:
    """Computed in the table's dtype, rounded once."""
    rope_twin(query, key, positions, cos_sin)
