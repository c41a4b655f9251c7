"""The parts of the gated delta rule that windows and chunks share, and one step of the recurrence (PyTorch
twin)."""

from __future__ import annotations

import math

import torch

from headway.kernels.reference._activations import sigmoid, softplus, wide
from headway.kernels.types._delta_rule import DeltaRule

UNIT_EPSILON = 1e-6


def queries_of(
    mixed: torch.Tensor,  # [..., channels]: queries, keys and values
    rule: DeltaRule,
) -> torch.Tensor:  # [..., V, K] float32 or float64
    """Returns the queries, of unit length times K ** -1/2, one for each head of values."""
    return _units(mixed[..., : rule.query_size], rule) / math.sqrt(rule.key_dim)


def keys_values_of(
    mixed: torch.Tensor,  # [..., keys and values]
    rule: DeltaRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys, of unit length, one for each head of values, [..., V, K], and the values, [..., V,
    D]."""
    values = _heads(mixed[..., rule.query_size :], rule.num_value_heads)
    return _units(mixed[..., : rule.query_size], rule), values


def gates_of(
    gates: torch.Tensor,  # [..., 2 * V]
    rule: DeltaRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the write gates, the logarithms of the decay), [..., V] each."""
    write, decay = wide(gates).chunk(2, dim=-1)
    return sigmoid(write), -rule.decay_log.exp() * softplus(decay + rule.decay_bias)


def step(
    states: torch.Tensor,  # [..., V, K, D]
    key: torch.Tensor,  # [..., V, K]
    value: torch.Tensor,  # [..., V, D]
    write: torch.Tensor,  # [..., V]
    decay: torch.Tensor,  # [..., V]
) -> torch.Tensor:  # [..., V, K, D]
    """Returns the states after one token."""
    kept = states * decay.exp()[..., None, None]
    found = (kept * key[..., None]).sum(-2)
    change = (value - found) * write[..., None]
    return kept + key[..., None] * change[..., None, :]


def read(
    states: torch.Tensor,  # [..., V, K, D]
    query: torch.Tensor,  # [..., V, K]
) -> torch.Tensor:  # [..., V, D]
    return (states * query[..., None]).sum(-2)


def _units(
    vectors: torch.Tensor,  # [..., heads of keys * K]
    rule: DeltaRule,
) -> torch.Tensor:  # [..., V, K]
    heads = _heads(vectors, rule.num_key_heads).contiguous()
    units = heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + UNIT_EPSILON)
    return units.repeat_interleave(rule.num_value_heads // rule.num_key_heads, dim=-2)


def _heads(
    vectors: torch.Tensor,  # [..., heads * dim]
    num_heads: int,
) -> torch.Tensor:  # [..., heads, dim] float32 or float64
    return wide(vectors).view(*vectors.shape[:-1], num_heads, -1)
