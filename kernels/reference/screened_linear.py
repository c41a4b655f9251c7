"""A linear layer of which the greatest outputs are exact and all others about right (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels._nibbles import unpack_nibbles

_LARGEST, _TINY = 127.0, 1e-30


def screened_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] of that dtype
    packed: torch.Tensor,  # [outputs, inputs // 2] int8: of pack_nibbles
    scales: torch.Tensor,  # [outputs] float32: weight is about scale * integer
    spreads: torch.Tensor,  # [2] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: x @ weight.T, exact where that could be the greatest of a row, else about so."""
    inputs = x.float()
    step = inputs.abs().amax(1, keepdim=True).clamp(min=_TINY) / _LARGEST
    steps = inputs / step
    rounded = torch.floor(steps + 0.5)
    error = step * torch.sqrt(spreads[0] * (steps * steps).sum(1, keepdim=True) + spreads[1])
    about = (rounded @ unpack_nibbles(packed).float().T) * (scales * step)
    off = scales * error
    could_be = about + off >= (about - off).amax(1, keepdim=True)
    result = torch.where(could_be, x @ weight.T, about.to(x.dtype))
    return result if out is None else out.copy_(result)
