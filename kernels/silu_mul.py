"""The gated activation of a feed-forward block."""

from __future__ import annotations

import torch

from headway.kernels.reference.silu_mul import silu_mul as silu_mul_twin


def silu_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * intermediate]: gate, then up
) -> torch.Tensor:
    """[tokens, intermediate]: silu(gate) * up."""
    return silu_mul_twin(gate_up)
