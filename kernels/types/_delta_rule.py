"""The inputs of a gated delta net's kernels: a layer's parameters, the state of rows, and chunks of
tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeltaRule(NamedTuple):
    """The sizes of a layer's heads, and the parameters of its gates. V: the number of heads of values; each
    head of queries and keys serves V / num_key_heads consecutive ones."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    decay_log: torch.Tensor  # [V] float32 or float64
    decay_bias: torch.Tensor  # [V] float32 or float64

    @property
    def query_size(self) -> int:
        """Returns the size of all queries of a token, which is that of all keys."""
        return self.num_key_heads * self.key_dim


class DeltaState(NamedTuple):
    """The state of one layer by state id, and the last window of each row. The first `counts` tokens of the
    window were accepted and are not in `states` yet.

    W: the most tokens of a window. K, D: the dimensions of keys and values.
    """

    states: torch.Tensor  # [entries, V, K, D] float32 or float64
    counts: torch.Tensor  # [entries] int64
    mixed: torch.Tensor  # [entries, W, keys and values of all heads]: after the convolution
    gates: torch.Tensor  # [entries, W, 2 * V]: as in `delta_windows`


class TokenSpans(NamedTuple):
    """n chunks of tokens in a flat list, at most one per row; a span of length 0 does not exist.
    is_generated: the tokens were generated before and are recomputed; they are not part of a prompt."""

    rows: torch.Tensor  # [n] int64: rows of the table
    first_tokens: torch.Tensor  # [n] int64: the place of each span's first token in the list
    lengths: torch.Tensor  # [n] int64
    is_generated: torch.Tensor  # [n] bool
