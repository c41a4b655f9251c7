"""Batch-invariant linear layers (PyTorch twin): the library's own product, which promises no order of
sums."""

from __future__ import annotations

import torch


def batch_invariant_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
) -> torch.Tensor:
    """Returns [rows, outputs]: x @ weight.T + bias."""
    return torch.nn.functional.linear(x, weight, bias)
