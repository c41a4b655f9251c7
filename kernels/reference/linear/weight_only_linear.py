"""Linear layers of quantised weights (PyTorch twin): the weight is expanded, and the library multiplies."""

from __future__ import annotations

import torch

from headway.kernels.reference.elementwise.gated_mul import gated_mul
from headway.kernels.reference.linear._quantized_weight import expanded_weight
from headway.kernels.types._epilogue import GateActivation
from headway.kernels.types._weights import QuantizedWeight


def weight_only_linear(
    x: torch.Tensor,  # [rows, inputs] bfloat16
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,  # [outputs] bfloat16
    *,
    gate: GateActivation | None = None,  # the weight's outputs are paired, without one they are not
    residual: torch.Tensor | None = None,  # [rows, outputs] bfloat16, added
    out: torch.Tensor | None = None,  # [rows, outputs] bfloat16; may be the residual
) -> torch.Tensor:
    """Returns x @ weight.T + bias, [rows, outputs], or gated, [rows, outputs / 2]; the residual is added to
    the rounded product."""
    product = torch.nn.functional.linear(x, expanded_weight(weight), bias)
    if gate is not None:
        product = gated_mul(product, gate)
    if residual is not None:
        return torch.add(residual, product, out=out)
    return product if out is None else out.copy_(product)
