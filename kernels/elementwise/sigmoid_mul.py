"""Multiplies results by the sigmoid of their gates."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.sigmoid_mul import sigmoid_mul as sigmoid_mul_twin


def sigmoid_mul(
    x: torch.Tensor,  # [tokens, heads, dim], in place
    gate: torch.Tensor,  # [tokens, heads, dim]
) -> None:
    """The sigmoid is computed in float32 (float64 for float64) and rounded before it multiplies."""
    sigmoid_mul_twin(x, gate)
