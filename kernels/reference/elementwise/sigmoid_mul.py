"""Multiplies results by the sigmoid of their gates (PyTorch twin)."""

from __future__ import annotations

import torch


def sigmoid_mul(
    x: torch.Tensor,  # [tokens, heads, dim], in place
    gate: torch.Tensor,  # [tokens, heads, dim]
) -> None:
    """The sigmoid is computed in float32 (float64 for float64) and rounded before it multiplies."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    # PyTorch's own sigmoid computes the last elements of a tensor by other instructions than the rest.
    x.mul_((1 / (1 + torch.exp(-wide))).to(x.dtype))
