"""A linear layer with 8-bit weights (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.linear.float8_linear import float8_linear


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] int8 or float8_e4m3fn
    scales: torch.Tensor,  # [outputs] float32; of float8 [1]
    *,
    step: torch.Tensor | None = None,  # [1] float32, of inputs to float8
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: (x @ weight.T) * scales, beside float8 of x rounded to float8 times step."""
    if step is None:
        result = torch.nn.functional.linear(x, weight.to(x.dtype)) * scales.to(x.dtype)
    else:
        result = float8_linear((x / step).to(weight.dtype), weight, step, scales, dtype=x.dtype)
    return result if out is None else out.copy_(result)
