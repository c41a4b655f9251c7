"""Linear layers of few rows (PyTorch twin): the library's own product, for any number of rows."""

from __future__ import annotations

import torch


def skinny_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
    *,
    residual: torch.Tensor | None = None,  # [rows, outputs] float, added
    out: torch.Tensor | None = None,  # [rows, outputs]; may be the residual
) -> torch.Tensor:
    """[rows, outputs]: x @ weight.T + bias + residual."""
    if out is not None and bias is None and residual is None and x.is_cuda:
        return torch.mm(x, weight.T, out=out)
    result = torch.nn.functional.linear(x, weight, bias)
    if residual is not None:
        result += residual
    return result if out is None else out.copy_(result)
