"""Multiplies results by the sigmoid of their gates (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import sigmoid, wide


def sigmoid_mul(
    x: torch.Tensor,  # [tokens, heads, dim], in place
    gate: torch.Tensor,  # [tokens, heads, dim]
) -> None:
    """Multiplies x by sigmoid(gate), which is computed in float32 (float64 for float64) and then rounded."""
    x.mul_(sigmoid(wide(gate)).to(x.dtype))
