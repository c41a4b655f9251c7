"""Float8 weights and rounded inputs: the product against float64."""

import pytest
import torch

from headway.kernels.linear.quantized_linear import quantized_linear


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 64, 130])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (304, 256)])
def test_the_product_is_that_of_the_numbers_of_8_bits(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    """Inputs are divided by a power of two, so that all that round them round alike."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no products of float8")
    generator = torch.Generator().manual_seed(rows)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(rows, inputs, generator=generator)
    if device.type != "cuda":
        # Triton's interpreter rounds up to half of the next power of two: here nothing is rounded up.
        x = x.to(torch.float8_e4m3fn).float() * (1 + torch.rand(rows, inputs, generator=generator) / 32)
    x = x.to(device, dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) * 50).to(device, torch.float8_e4m3fn)
    step, scale = (torch.tensor([value], device=device) for value in (1 / 64, 0.003))
    rounded = (x.float() / step).to(torch.float8_e4m3fn).double()
    expected = (rounded @ weight.double().T) * step.double() * scale.double()
    # Tensor cores may keep 13 bits of a sum's greatest product.
    bound = (rounded.abs() @ weight.double().abs().T) * step.double() * scale.double() * 2**-12
    result = quantized_linear(x, weight, scale, step)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    error = (result.double() - expected).abs()
    assert bool((error <= bound + expected.abs() * torch.finfo(dtype).eps).all()), float(
        (error - bound).max()
    )


@pytest.mark.parametrize("rows", [2, 20])
def test_given_memory_is_filled_and_its_margins_stay(rows: int, device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backing = torch.full((rows + 2, 200), 7.0, device=device, dtype=dtype)
    x = torch.ones(rows, 128, device=device, dtype=dtype)
    out = backing[1:-1, 20:164]
    weight = torch.ones(144, 128, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=device)
    result = quantized_linear(x, weight, one, one, out=out)
    assert result is out
    assert bool((out == 128).all())
    assert bool((backing[[0, -1]] == 7).all())
    assert bool((backing[:, :20] == 7).all())
    assert bool((backing[:, 164:] == 7).all())
