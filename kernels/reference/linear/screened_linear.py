"""A linear layer whose greatest outputs are exact and whose others are approximate (PyTorch twin)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headway.kernels.types._int4_packing import unpack_nibbles

# At most LOOKED_AT of OUTPUTS adjacent outputs are computed exactly.
OUTPUTS, LOOKED_AT = 128, 8
_LARGEST, _TINY = 127.0, 1e-30


def screened_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] of that dtype
    packed: torch.Tensor,  # [outputs, inputs // 2] int8: of pack_nibbles
    scales: torch.Tensor,  # [outputs] float32: weight is about scale * integer
    errors: torch.Tensor,  # [outputs] float32: standard deviations of weight from that
    spreads: torch.Tensor,  # [2] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns x @ weight.T, [rows, outputs], exact for outputs that could be the greatest of a row, else
    approximate."""
    inputs = x.float()
    largest = inputs.abs().amax(1, keepdim=True)
    step = largest.clamp(min=_TINY) / _LARGEST
    steps = inputs / step
    rounded = torch.floor(steps + 0.5)
    error = step * torch.sqrt(spreads[0] * (steps * steps).sum(1, keepdim=True) + spreads[1])
    error = error.where(largest > 0, 0)
    about = (rounded @ unpack_nibbles(packed).float().T) * (scales * step)
    off = errors * error
    could_be = (about + off >= (about - off).amax(1, keepdim=True)) & (error > 0)
    candidates = about.masked_fill(~could_be, -torch.inf)
    tiles = F.pad(candidates, (0, -about.shape[1] % OUTPUTS), value=-torch.inf).unfold(1, OUTPUTS, OUTPUTS)
    least = tiles.topk(LOOKED_AT, dim=2).values[:, :, -1].repeat_interleave(OUTPUTS, 1)[:, : about.shape[1]]
    could_be &= candidates >= least
    result = torch.where(could_be, x @ weight.T, about.to(x.dtype))
    return result if out is None else out.copy_(result)
