"""The gated activation of a feed-forward block (PyTorch twin)."""

from __future__ import annotations

import torch


def silu_mul(
    gate_up: torch.Tensor,  # [tokens, 2 * intermediate]: gate, then up
) -> torch.Tensor:
    """[tokens, intermediate]: silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)
