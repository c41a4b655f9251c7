"""Causal attention of windows of queries over the paged cache."""

from __future__ import annotations

import torch

from headway.kernels.reference.paged_attention import paged_attention as paged_attention_twin


def paged_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    scale: float,
    *,
    first_position: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window, q_heads, head_dim]: query w of a row sees keys first_position .. start + w."""
    return paged_attention_twin(
        query,
        key_cache,
        value_cache,
        block_table,
        start_positions,
        scale,
        first_position=first_position,
        out=out,
    )
