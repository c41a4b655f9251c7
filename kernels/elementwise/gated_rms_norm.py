"""A root-mean-square norm of each head, times the silu of a gate."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.gated_rms_norm import gated_rms_norm as gated_rms_norm_twin


def gated_rms_norm(
    x: torch.Tensor,  # [tokens, heads, dim]
    gate: torch.Tensor,  # [tokens, heads, dim]
    weight: torch.Tensor,  # [dim]
    epsilon: float,
) -> torch.Tensor:
    """Returns [tokens, heads, dim]. Statistics and gate are in float32 (float64 for float64); the norm is rounded before the
    weight multiplies it, the product before the gate does."""
    return gated_rms_norm_twin(x, gate, weight, epsilon)
