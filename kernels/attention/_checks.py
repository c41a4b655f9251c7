"""Holds what all attention kernels share: the base of their exponentials, and the checks of their tensors."""

from __future__ import annotations

import torch

from headway.kernels.types._score_rule import ScoreRule

# Scores are scaled by it: powers of two are what a GPU computes.
LOG2_E = 1.4426950408889634
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256


def check_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    out: torch.Tensor,  # [rows, window, q_heads, head_dim]
    rule: ScoreRule,
) -> None:
    """Heads are contiguous and powers of two; one address leads to a key and to its value."""
    head_dim = query.shape[3]
    is_size = head_dim & (head_dim - 1) == 0 and _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM
    assert is_size, f"head_dim is {head_dim}, the kernels take powers of two from 16 to 256"
    assert key_cache.stride() == value_cache.stride(), (key_cache.stride(), value_cache.stride())
    strides = [tensor.stride(3) for tensor in (query, key_cache, out)]
    assert strides == [1, 1, 1], f"elements of a head stand {strides} apart, not side by side"
    assert query.shape[2] % key_cache.shape[2] == 0, (query.shape, key_cache.shape)
    assert (rule.window, rule.soft_cap) == (0, 0), f"the kernels have no windows and no soft caps: {rule}"
