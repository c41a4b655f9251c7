"""Linear layers of few rows (PyTorch twin): the library's own product, for any number of rows."""

from __future__ import annotations

import torch

from headway.kernels._late_norm import LateNorm


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


def skinny_gate_up(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [2 * outputs, inputs] float: gate, then up
    *,
    norm: LateNorm | None = None,  # of x
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: silu(x @ gate.T) * (x @ up.T)."""
    product = torch.nn.functional.linear(x, weight)
    if norm is not None:
        product = (product * norm.factor(x.shape[1])).to(x.dtype)
    gate, up = product.chunk(2, dim=-1)
    result = torch.nn.functional.silu(gate) * up
    return result if out is None else out.copy_(result)
