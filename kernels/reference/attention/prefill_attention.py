"""Causal attention of long chunks of queries over the paged KV cache (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.attention.paged_attention import paged_attention
from headway.kernels.types._score_rule import ScoreRule


def prefill_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [rows, max_blocks] int32 or int64; entries not in use may be -1
    start_positions: torch.Tensor,  # [rows] int64
    rule: ScoreRule,
    *,
    end_positions: torch.Tensor | None = None,  # [rows] int64
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns what `paged_attention` returns, for windows of any width."""
    return paged_attention(
        query, key_cache, value_cache, block_table, start_positions, rule,
        end_positions=end_positions, out=out,
    )  # fmt: skip
