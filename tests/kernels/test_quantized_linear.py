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
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * (inputs**0.5)
    torch.testing.assert_close(
        quantized_linear(x, weight, scales).double(), expected, rtol=1e-2, atol=tolerance
    )


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
