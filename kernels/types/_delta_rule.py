"""What the kernels of a gated delta net are given: a layer's parameters, the state of rows, and the tokens of
prompts by row."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeltaRule(NamedTuple):
    """The sizes of a layer's heads, and the parameters of its gates. V: heads of values; each head of queries
    and keys serves V / num_key_heads of them, one after the other."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    decay_log: torch.Tensor  # [V] float32 or float64
    decay_bias: torch.Tensor  # [V] float32 or float64

    @property
    def query_size(self) -> int:
        """The size of all queries of a token, and of all keys."""
        return self.num_key_heads * self.key_dim


class DeltaState(NamedTuple):
    """The state of one layer by state id, and the last window of each row. Of the window the first `counts`
    tokens have stayed and are not in `states` yet.

    W: the most tokens of a window. K, D: the dimensions of keys and values.
    """

    states: torch.Tensor  # [entries, V, K, D] float32 or float64
    counts: torch.Tensor  # [entries] int64
    mixed: torch.Tensor  # [entries, W, keys and values of all heads]: those after the convolution
    gates: torch.Tensor  # [entries, W, 2 * V]: as `delta_windows` gets them


class TokenSpans(NamedTuple):
    """Chunks of tokens in a flat list, n of them; a span of length 0 does not exist. No row has two.

    is_generated: the tokens are not the prompt's but were generated, and are computed once more.
    """

    rows: torch.Tensor  # [n] int64: rows of the table
    first_tokens: torch.Tensor  # [n] int64: the place of each span's first token in the list
    lengths: torch.Tensor  # [n] int64
    is_generated: torch.Tensor  # [n] bool
