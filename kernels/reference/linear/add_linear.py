"""A linear layer whose result goes to the residual stream, and what the next norm needs of the stream (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._deferred_norm import LateNorm, square_tiles


def add_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [hidden, inputs] float
    residual: torch.Tensor,  # [rows, hidden] float, in place: += x @ weight.T
    norm_weight: torch.Tensor,  # [hidden] float: of the norm that comes next
    epsilon: float,
) -> tuple[torch.Tensor, LateNorm]:
    """([rows, hidden]: the new residual times norm_weight, what is left to do of the norm)."""
    residual += torch.nn.functional.linear(x, weight)
    squares = torch.zeros(len(x), 64 * square_tiles(weight.shape[0]), dtype=torch.float32, device=x.device)
    squares[:, : weight.shape[0]] = residual.float().square()
    return residual * norm_weight, LateNorm(squares.view(len(x), -1, 64).sum(2), epsilon)
