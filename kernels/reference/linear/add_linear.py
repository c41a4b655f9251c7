"""A linear layer with a fused residual addition and the first half of the next RMSNorm (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._deferred_norm import DeferredNorm, square_tiles


def add_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [hidden, inputs] float
    residual: torch.Tensor,  # [rows, hidden] float, in place: += x @ weight.T
    norm_weight: torch.Tensor,  # [hidden] float: of the next norm
    epsilon: float,
    *,
    bias: torch.Tensor | None = None,  # [hidden] float
    unit_offset: bool = False,  # the norm multiplies by 1 + norm_weight
) -> tuple[torch.Tensor, DeferredNorm]:
    """Adds x @ weight.T + bias to the residual. Returns (the new residual times the norm's weight, [rows,
    hidden], the rest of the norm)."""
    residual += torch.nn.functional.linear(x, weight, bias)
    squares = torch.zeros(len(x), 64 * square_tiles(weight.shape[0]), dtype=torch.float32, device=x.device)
    squares[:, : weight.shape[0]] = residual.float().square()
    factor = 1 + norm_weight if unit_offset else norm_weight
    return residual * factor, DeferredNorm(squares.view(len(x), -1, 64).sum(2), epsilon)
