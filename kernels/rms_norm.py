"""Root-mean-square norm, alone or after a residual addition."""

from __future__ import annotations

import torch

from headway.kernels.reference.rms_norm import add_rms_norm as add_rms_norm_twin
from headway.kernels.reference.rms_norm import rms_norm as rms_norm_twin


def rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden], dtype of x."""
    return rms_norm_twin(x, weight, epsilon, unit_offset=unit_offset)


def add_rms_norm(
    x: torch.Tensor,  # [tokens, hidden] float
    residual: torch.Tensor,  # [tokens, hidden] float, in place: += x
    weight: torch.Tensor,  # [hidden] float
    epsilon: float,
    *,
    unit_offset: bool = False,
) -> torch.Tensor:
    """[tokens, hidden]: the norm of the new residual."""
    return add_rms_norm_twin(x, residual, weight, epsilon, unit_offset=unit_offset)
