"""Activations whose bits do not depend on where an element stands in its tensor, as those of PyTorch on a CPU do.

`torch.sigmoid`, `silu` and `softplus` compute the last elements of a tensor by other instructions than the rest; `exp`,
`log1p` and the operations of arithmetic do not.
"""

from __future__ import annotations

import torch


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns x in float32, or in float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
