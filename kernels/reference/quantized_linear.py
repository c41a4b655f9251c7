"""A linear layer with 8-bit weights and one scale an output (PyTorch twin)."""

from __future__ import annotations

import torch


def quantized_linear(
    x: torch.Tensor,  # [rows, inputs] float
    weight: torch.Tensor,  # [outputs, inputs] int8
    scales: torch.Tensor,  # [outputs] float32
    *,
    out: torch.Tensor | None = None,  # [rows, outputs]
) -> torch.Tensor:
    """[rows, outputs]: (x @ weight.T) * scales."""
    result = torch.nn.functional.linear(x, weight.to(x.dtype)) * scales.to(x.dtype)
    return result if out is None else out.copy_(result)
