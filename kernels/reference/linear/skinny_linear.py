"""Linear layers of few rows (PyTorch twin): the library's own product, for any number of rows."""

from __future__ import annotations

import torch

from headway.kernels.types._deferred_norm import DeferredNorm


def skinny_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float
    bias: torch.Tensor | None = None,  # [outputs] float
    *,
    norm: DeferredNorm | None = None,  # of x
    residual: torch.Tensor | None = None,  # [rows, outputs] float, added
    out: torch.Tensor | None = None,  # [rows, outputs]; may be the residual
) -> torch.Tensor:
    """Returns [rows, outputs]: x @ weight.T + bias + residual."""
    is_plain = bias is None and norm is None and residual is None
    if out is not None and is_plain and x.is_cuda:
        return torch.mm(x, weight.T, out=out)
    if residual is not None and bias is None and norm is None and x.is_cuda:
        return torch.addmm(residual, x, weight.T, out=out)
    if norm is None:
        result = torch.nn.functional.linear(x, weight, bias)
    else:
        result = (torch.nn.functional.linear(x, weight) * norm.factor(x.shape[1])).to(x.dtype)
        result = result if bias is None else result + bias
    if residual is not None:
        result += residual
    return result if out is None else out.copy_(result)
