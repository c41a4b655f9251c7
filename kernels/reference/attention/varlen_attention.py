"""Causal attention of chunks of different lengths over the paged cache (PyTorch twin), chunk by chunk."""

from __future__ import annotations

import torch

from headway.kernels.reference.attention.paged_attention import paged_attention
from headway.kernels.types._score_rule import ScoreRule


def varlen_attention(
    query: torch.Tensor,  # [tokens, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    block_table: torch.Tensor,  # [chunks, max_blocks] int32 or int64; entries not in use may be -1
    first_tokens: torch.Tensor,  # [chunks] int64
    lengths: torch.Tensor,  # [chunks] int64; 0: no chunk
    start_positions: torch.Tensor,  # [chunks] int64
    rule: ScoreRule,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [tokens, q_heads, head_dim]: the token first + w of a chunk, w < length, attends to the keys up
    to position start + w that the rule makes visible. The results of tokens of no chunk are not written."""
    result = torch.empty_like(query) if out is None else out
    for chunk, (first, length) in enumerate(zip(first_tokens.tolist(), lengths.tolist(), strict=True)):
        if length == 0:
            continue
        own, row = slice(first, first + length), slice(chunk, chunk + 1)
        result[own] = paged_attention(
            query[None, own], key_cache, value_cache, block_table[row], start_positions[row], rule
        )[0]
    return result
