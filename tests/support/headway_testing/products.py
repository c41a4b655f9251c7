"""Inputs and weights of linear layers, and how near a product must come to float64's."""

import torch

# Relative to the root mean square of the result; bfloat16 rounds results to 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def tensors(
    rows: int, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return x.to(device, dtype), weight.to(device, dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = (result.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) <= TOLERANCE[result.dtype]


def assert_each_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """So that one wrong part of many right ones is seen."""
    scale = expected.abs() + expected.square().mean().sqrt()
    assert float(((result.double() - expected).abs() / scale).max()) <= 2 * TOLERANCE[result.dtype]
