"""An RMSNorm of each head, times the SiLU of a gate (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import silu, wide


def gated_rms_norm(
    x: torch.Tensor,  # [tokens, heads, dim]
    gate: torch.Tensor,  # [tokens, heads, dim]
    weight: torch.Tensor,  # [dim]
    epsilon: float,
) -> torch.Tensor:
    """Returns [tokens, heads, dim]. Statistics and gate are in float32 (float64 for float64); the norm is
    rounded before the weight multiplies it, the product before the gate does."""
    values = wide(x)
    normed = values * torch.rsqrt((values * values).mean(-1, keepdim=True) + epsilon)
    weighted = weight * normed.to(x.dtype)
    return (weighted * silu(wide(gate))).to(x.dtype)
