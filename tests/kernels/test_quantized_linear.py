"""8-bit weights: the product against float64."""

import pytest
import torch

from headway.kernels import quantized_linear


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (300, 256)])
def test_the_product_is_that_of_the_integers(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(rows)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(rows, inputs, generator=generator).to(device, dtype)
    weight = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8).to(device)
    scales = (torch.rand(outputs, generator=generator) / 100).to(device)
    expected = (x.double() @ weight.double().T) * scales.double()
    # Inputs may be off by half a fine step; the result is rounded to its type.
    half_steps = x.double().abs().amax(1, keepdim=True) / 127 / 254 / 2
    bound = (
        half_steps * (weight.double().abs().sum(1) * scales.double())
        + expected.abs() * torch.finfo(dtype).eps
    )
    error = (quantized_linear(x, weight, scales).double() - expected).abs()
    assert bool((error <= bound + 1e-6).all()), float((error - bound).max())


def test_rows_of_any_magnitude_keep_their_digits(device: torch.device) -> None:
    """Zeros, tiny rows, and one input that dwarfs the others: 16 bits of the row's greatest are left."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.zeros(4, 128, device=device, dtype=dtype)
    x[1], x[2, 3], x[3] = 1e-20, 100.0, 0.5
    x[2, 4] = 0.01
    weight = torch.ones(128, 128, dtype=torch.int8, device=device)
    result = quantized_linear(x, weight, torch.ones(128, device=device)).double()
    expected = x.double().sum(1, keepdim=True).expand(4, 128)
    torch.testing.assert_close(result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-5, atol=0)


def test_given_memory_is_filled_and_its_margins_stay(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backing = torch.full((4, 200), 7.0, device=device, dtype=dtype)
    x = torch.ones(2, 128, device=device, dtype=dtype)
    weight = torch.ones(150, 128, dtype=torch.int8, device=device)
    out = backing[1:3, 20:170]
    assert quantized_linear(x, weight, torch.ones(150, device=device), out=out) is out
    assert bool((out == 128).all())
    assert bool((backing[[0, 3]] == 7).all())
    assert bool((backing[:, :20] == 7).all())
    assert bool((backing[:, 170:] == 7).all())
