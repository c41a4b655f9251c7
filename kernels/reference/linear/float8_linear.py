"""A linear layer of float8 inputs and weights with per-tensor scales (PyTorch twin)."""

from __future__ import annotations

import torch


def float8_linear(
    x: torch.Tensor,  # [rows, inputs] float8_e4m3fn
    weight: torch.Tensor,  # [outputs, inputs] float8_e4m3fn
    step: torch.Tensor,  # [1] float32: x times step are the inputs
    scale: torch.Tensor,  # [1] float32: weight times scale is the weight
    bias: torch.Tensor | None = None,  # [outputs]
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns (x * step) @ (weight * scale).T + bias, [rows, outputs] of that dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    product = torch.nn.functional.linear(x.to(wide), weight.to(wide)) * (step * scale).to(wide)
    return (product if bias is None else product + bias.to(wide)).to(dtype)
