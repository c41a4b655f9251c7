"""The gated activation of a feed-forward block (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import gated_product


def gated_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * intermediate]: gate, then up
) -> torch.Tensor:
    """[tokens, intermediate]: silu(gate) * up."""
    return gated_product(*gate_up.chunk(2, dim=-1))
