"""Root-mean-square norm, alone or after a residual addition (PyTorch twin).

Statistics are in float32 (float64 for float64). A plain weight multiplies what was rounded to the input's
dtype; with `unit_offset` the factor (1 + weight) is applied before rounding: the orders the models were
trained with.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden], dtype of x."""
    if x.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.rms_norm(x, weight.shape, 1 + weight if unit_offset else weight, epsilon)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * (1 + weight.float())).to(x.dtype) if unit_offset else weight * wide.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    residual: torch.Tensor,  # [tokens, hidden] float, in place: += x
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden]: the norm of the new residual."""
    return rms_norm(residual.add_(x), weight, epsilon, unit_offset=unit_offset)
