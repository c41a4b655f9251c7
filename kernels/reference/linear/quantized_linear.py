"""A linear layer with float8 weights and inputs that it quantises to float8 (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.linear.float8_linear import float8_linear


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] float8_e4m3fn
    scale: torch.Tensor,  # [1] float32
    step: torch.Tensor,  # [1] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """Returns (float8(x / step) * step) @ (weight * scale).T, [rows, outputs] in x's dtype."""
    result = float8_linear((x / step).to(weight.dtype), weight, step, scale, dtype=x.dtype)
    return result if out is None else out.copy_(result)
