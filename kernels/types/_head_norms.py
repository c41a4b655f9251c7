"""The norms of each head of queries and keys before their rotation (Qwen3)."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadNorms(NamedTuple):
    """The weights of the RMSNorms over head_dim. unit_offset: the factor is 1 + weight."""

    query: torch.Tensor  # [head_dim] float
    key: torch.Tensor  # [head_dim] float
    epsilon: float
    unit_offset: bool = False
