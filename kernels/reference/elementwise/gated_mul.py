"""The gated activation of a feed-forward block (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import gated_product
from headway.kernels.types._epilogue import GateActivation


def gated_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * intermediate]: gate, then up
    activation: GateActivation = "silu",
) -> torch.Tensor:
    """Returns activation(gate) * up, [tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gated_product(gate, up, activation)
