"""Products of float8 against float64."""

import pytest
import torch

from headway.kernels import float8_linear
from headway.kernels._device import is_hopper
from headway.kernels._streamed import streams_of


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (304, 256), (96, 8192)])
def test_the_product_is_that_of_the_numbers_of_8_bits(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no products of float8")
    check(rows, outputs, inputs, dtype, device, has_bias=has_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 17, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 8192), (22016, 4096)], ids=str)
def test_products_that_stream(rows: int, outputs: int, inputs: int) -> None:
    """On Hopper: a row's result is the same beside any of up to 64, again and again."""
    device = torch.device("cuda")
    if not is_hopper(device):
        pytest.skip("bulk copies are Hopper's")
    x, weight, step, scale = check(rows, outputs, inputs, torch.bfloat16, device, has_bias=rows % 2 > 0)
    assert streams_of(x, weight) is not None
    all_rows = torch.cat([x, x.flip(0)])[:64]
    result = float8_linear(all_rows, weight, step, scale, dtype=torch.bfloat16)
    for _ in range(50):
        assert torch.equal(float8_linear(x, weight, step, scale, dtype=torch.bfloat16), result[:rows])


def check(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> tuple[torch.Tensor, ...]:
    """(x, weight, step, scale)."""
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
    # Tensor cores may keep 13 bits of a sum: each 32 inputs lose up to 2**-13 of what is there by then, which stays under
    # four times the root of all squares.
    square = (x.double() ** 2) @ (weight.double() ** 2).T
    bound = 4 * square.sqrt() * factor * (-(-inputs // 32) + 1) * 2**-13
    error = (result.double() - expected).abs()
    assert bool((error <= bound + 2 * expected.abs() * torch.finfo(dtype).eps + 1e-6).all())
    return x, weight, step, scale
