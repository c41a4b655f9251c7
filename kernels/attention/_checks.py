"""Checks the tensors of all attention kernels, and computes the factors of their scores."""

from __future__ import annotations

import torch

from headway.kernels.types._score_rule import ScoreRule

# Scores are scaled by it, because a GPU computes powers of two.
_LOG2_E = 1.4426950408889634
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 16, 256


def check_attention(
    query: torch.Tensor,  # [rows, window, q_heads, head_dim]
    key_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    out: torch.Tensor,  # [rows, window, q_heads, head_dim]
) -> None:
    """Asserts that heads are contiguous and powers of two, and that keys and values have the same strides."""
    head_dim = query.shape[3]
    is_size = head_dim & (head_dim - 1) == 0 and _MIN_HEAD_DIM <= head_dim <= _MAX_HEAD_DIM
    assert is_size, f"head_dim is {head_dim}, the kernels take powers of two from 16 to 256"
    assert key_cache.stride() == value_cache.stride(), (key_cache.stride(), value_cache.stride())
    strides = [tensor.stride(3) for tensor in (query, key_cache, out)]
    assert strides == [1, 1, 1], f"elements of a head stand {strides} apart, not side by side"
    assert query.shape[2] % key_cache.shape[2] == 0, (query.shape, key_cache.shape)


def score_factors(rule: ScoreRule) -> tuple[float, float | None, int | None]:
    """Returns (scale, slope, sliding window) for the kernels; None, which they are compiled for, where there
    is no soft cap or no window.

    A query-key product s has the weight 2 ** (scale * s). With a soft cap the weight is 2 ** (scale * t),
    where t = tanh(s * rule.scale / soft_cap) is 1 - 2 / (2 ** (slope * s) + 1).
    """
    window = rule.window or None
    if rule.soft_cap == 0:
        return rule.scale * _LOG2_E, None, window
    return rule.soft_cap * _LOG2_E, 2 * _LOG2_E * rule.scale / rule.soft_cap, window
