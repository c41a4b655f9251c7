"""Products of float8 against float64."""

import pytest
import torch
from headway_testing.products import assert_each_launch_waits

from headway.kernels import gated_mul, rms_norm
from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel
from headway.kernels.linear.float8_linear import float8_linear

# Whole sums, in two parts of an even and an odd number of copies, in four; three tiles a program.
SHAPES = [(6144, 4096), (4096, 8192), (4096, 11776), (2048, 16384), (22016, 4096)]


def inputs_and_weight(rows: int, outputs: int, inputs: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """(x, weight, step, scale)."""
    generator = torch.Generator().manual_seed(rows)
    x, weight = (
        (torch.randn(n, inputs, generator=generator) * 20).to(device, torch.float8_e4m3fn)
        for n in (rows, outputs)
    )
    return x, weight, torch.tensor([1 / 64], device=device), torch.tensor([0.0003], device=device)


def assert_is_product(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    step: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """A sum in float32 keeps almost all; Hopper's tensor cores keep some 13 bits of it, so that each 32
    inputs lose up to 2**-13 of what has been added up by then: estimated as four times the root of all
    squares at most, and half of that root on the average."""
    product = x.double() @ weight.double().T
    factor = step.double() * scale.double()
    expected = product * factor + (0 if bias is None else bias.double())
    rounding = 2 * expected.abs() * torch.finfo(result.dtype).eps + 1e-6
    error = (result.double() - expected).abs()
    if not x.is_cuda:
        assert bool(
            (error <= (x.double().abs() @ weight.double().abs().T) * factor * 2**-12 + rounding).all()
        )
        return
    root = ((x.double() ** 2) @ (weight.double() ** 2).T).sqrt() * factor
    lost = (x.shape[1] // 32 + 1) * 2**-13 * root
    assert bool((error <= 4 * lost + rounding).all())
    assert error.square().mean() <= (lost + rounding).square().mean()


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (304, 256), (96, 8192)])
def test_the_product_is_that_of_the_numbers_of_8_bits(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, *, has_bias: bool
) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no products of float8")
    x, weight, step, scale = inputs_and_weight(rows, outputs, inputs, device)
    bias = torch.randn(outputs).to(device, dtype) if has_bias else None
    result = float8_linear(x, weight, step, scale, bias, dtype=dtype)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    if rows > 0:
        assert_is_product(result, x, weight, step, scale, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES, ids=str)
def test_products_that_stream(
    outputs: int, inputs: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch, *, has_bias: bool
) -> None:
    """A row's result is the same beside any of up to 64, wherever it stands."""
    x, weight, step, scale = inputs_and_weight(64, outputs, inputs, hopper)
    bias = torch.randn(outputs).to(hopper, torch.bfloat16) if has_bias else None
    assert choice_of(x, weight, FusedOperation.ADD).kernel is LinearKernel.TMA
    together = float8_linear(x, weight, step, scale, bias, dtype=torch.bfloat16)
    assert_is_product(together, x, weight, step, scale, bias)
    for rows in (1, 2, 5, 8, 9, 16, 17, 32, 33, 59):
        some = float8_linear(x[5 : 5 + rows], weight, step, scale, bias, dtype=torch.bfloat16)
        assert torch.equal(some, together[5 : 5 + rows]), rows
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    again = [float8_linear(x, weight, step, scale, bias, dtype=torch.bfloat16) for _ in range(50)]
    assert all(torch.equal(result, together) for result in again)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 48, 64])
def test_products_wait_for_what_stands_in_front(
    rows: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched one over the other, with other inputs each time: nothing is read that was there before."""
    monkeypatch.undo()
    generator = torch.Generator(hopper).manual_seed(rows)
    weights = [
        torch.randn(n, k, generator=generator, device=hopper).to(torch.float8_e4m3fn)
        for n, k in ((6144, 4096), (22016, 4096), (4096, 8192))
    ]
    norm = torch.ones(4096, dtype=torch.bfloat16, device=hopper)
    step, scale = torch.tensor([1 / 64], device=hopper), torch.tensor([1 / 64], device=hopper)

    def compute(x: torch.Tensor, waits: bool) -> torch.Tensor:
        def product(x: torch.Tensor, which: int) -> torch.Tensor:
            out = float8_linear(x, weights[which], step, scale, dtype=torch.bfloat16)
            if waits:
                torch.cuda.synchronize()
            return out

        for _ in range(3):
            attended = product(rms_norm(x, norm, 1e-5, step=step), 0)[:, :4096].contiguous()
            gated = gated_mul(product(rms_norm(attended, norm, 1e-5, step=step), 1))[:, :8192]
            x = product(gated.clamp(-400, 400).to(torch.float8_e4m3fn), 2)
        return x

    x = torch.randn(rows, 4096, generator=generator, device=hopper).to(torch.bfloat16)
    assert_each_launch_waits(compute, x, generator)
