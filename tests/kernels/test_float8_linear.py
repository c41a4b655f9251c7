"""Products of float8 against float64."""

import pytest
import torch

from headway.kernels import float8_linear


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (304, 256), (96, 8192)])
def test_the_product_is_that_of_the_numbers_of_8_bits(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no products of float8")
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        (torch.randn(n, inputs, generator=generator) * 20).to(device, torch.float8_e4m3fn)
        for n in (rows, outputs)
    )
    step, scale = (torch.tensor([value], device=device) for value in (1 / 64, 0.0003))
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if has_bias else None
    result = float8_linear(x, weight, step, scale, bias, dtype=dtype)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    factor = step.double() * scale.double()
    expected = (x.double() @ weight.double().T) * factor + (0 if bias is None else bias.double())
    # Tensor cores may keep 13 bits of a sum's greatest product.
    bound = (x.double().abs() @ weight.double().abs().T) * factor * 2**-12
    error = (result.double() - expected).abs()
    assert bool((error <= bound + 2 * expected.abs() * torch.finfo(dtype).eps + 1e-6).all())
