"""A gate and its `up` in one product, and the gated activation (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import gated_product
from headway.kernels.types._deferred_norm import DeferredNorm
from headway.kernels.types._epilogue import GateActivation


def gated_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [2 * outputs, inputs] float: gate, then up
    bias: torch.Tensor | None = None,  # [2 * outputs] float
    *,
    activation: GateActivation = "silu",
    norm: DeferredNorm | None = None,  # of x
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns activation(x @ gate.T) * (x @ up.T), [rows, outputs]. The bias is added to both products."""
    if norm is None:
        product = torch.nn.functional.linear(x, weight, bias)
    else:
        product = (torch.nn.functional.linear(x, weight) * norm.factor(x.shape[1])).to(x.dtype)
        product = product if bias is None else product + bias
    gate, up = product.chunk(2, dim=-1)
    result = gated_product(gate, up, activation)
    return result if out is None else out.copy_(result)
