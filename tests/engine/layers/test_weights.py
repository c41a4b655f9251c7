"""Weights in other formats: packed for a CPU, in float8, in 4 bits."""

from __future__ import annotations

import pytest
import torch

from headway.engine.layers import linear as linear_module
from headway.engine.layers.linear import Linear, finish_linears
from headway.engine.layers.weights import (
    DEVIATIONS,
    QUANTIZED_AT_ONCE,
    float8_weight,
    int4_screened_weight,
    quantize_to_nibbles,
    to_float8,
)
from headway.kernels import DenseWeight, most_screened_rows
from headway.kernels.linear import _cpu_linear
from headway.kernels.linear._cpu_linear import CAN_PACK
from headway.kernels.types._int4_packing import unpack_nibbles


def random_linear(out_size: int, in_size: int, dtype: torch.dtype = torch.float32) -> Linear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_size, in_size, dtype=dtype, generator=generator) / in_size**0.5
    return Linear(weight, torch.randn(out_size, dtype=dtype, generator=generator))


def random_rows(count: int, in_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, in_size, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("is_single_row_alike", [True, False], ids=["alike", "not-alike"])
def test_single_rows_are_doubled_only_where_they_differ(
    is_single_row_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(x))
        return x.sum(1, keepdim=True) + (0 if is_single_row_alike or len(x) > 1 else 1e-3)

    monkeypatch.setattr(_cpu_linear, "_packed", lambda weight: weight)
    monkeypatch.setattr(_cpu_linear, "_onednn_linear", multiply)
    monkeypatch.setattr(_cpu_linear, "CAN_PACK", True)
    layer = random_linear(1, 4)
    finish_linears([layer])
    assert layer(torch.ones(1, 4)).tolist() == [[4.0]]
    assert seen[-1] == (1 if is_single_row_alike else 2)


def test_a_layer_whose_rows_depend_on_their_number_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cpu_linear, "_packed", lambda weight: weight)
    monkeypatch.setattr(_cpu_linear, "_onednn_linear", lambda x, packed, bias: x + (len(x) == 17))
    monkeypatch.setattr(_cpu_linear, "CAN_PACK", True)
    layer = random_linear(3, 4)
    finish_linears([layer])
    assert torch.equal(layer.weight, random_linear(3, 4).weight)


def test_each_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[torch.Tensor] = []

    def least_rows(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        tried.append(weight)

    monkeypatch.setattr(linear_module, "least_packed_rows", least_rows)
    monkeypatch.setattr(_cpu_linear, "CAN_PACK", True)
    layers = [random_linear(3, 4), random_linear(3, 4), random_linear(4, 3), Linear(torch.ones(3, 4))]
    finish_linears([*layers, random_linear(3, 4, torch.float64)])
    assert [weight.data_ptr() for weight in tried] == [layers[i].weight.data_ptr() for i in (0, 2, 3)]


def test_a_packed_weight_exists_once() -> None:
    layer = random_linear(8, 4)
    finish_linears([layer])
    if CAN_PACK:
        with pytest.raises(AssertionError, match="given up"):
            _ = layer.weight
    else:
        assert layer.weight.shape == (8, 4)


@pytest.mark.parametrize("num_outputs", [50, QUANTIZED_AT_ONCE + 3])
def test_a_weight_in_float8_keeps_four_significant_bits(num_outputs: int) -> None:
    weight = torch.randn(num_outputs, 64, generator=torch.Generator().manual_seed(0))
    weight[7], weight[8] = 0, weight[8] / 100
    rounded, scale = to_float8(weight)
    assert (rounded.dtype, scale.shape) == (torch.float8_e4m3fn, (1,))
    error = (rounded.float() * scale - weight).abs()
    assert bool((error <= weight.abs() / 16 * 1.001 + scale * 2**-10).all())
    assert rounded.float().abs().max() == 448


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 33, 200])
def test_any_number_of_rows_takes_float8(count: int, size: float) -> None:
    """The largest input that was announced is among them."""
    full = Linear(random_linear(300, 128).weight)
    x = random_rows(count, 128) * size
    x[0, 5] = largest = 11.3 * size
    quantized, wanted = Linear(float8_weight(full.weight, largest_input=largest))(x), full(x)
    error = (quantized - wanted).norm() / wanted.norm()
    assert 0.001 < error < 0.05


@pytest.mark.parametrize("inputs", [256, 2048])
def test_few_rows_have_their_greatest_in_full_many_another_layer(inputs: int) -> None:
    full = Linear(random_linear(300, inputs).weight)
    other = Linear(random_linear(300, inputs).weight + 1)
    screened = Linear(int4_screened_weight(full.weight, DenseWeight(other.weight)))
    most = most_screened_rows(inputs)
    assert torch.equal(screened(random_rows(most + 1, inputs)), other(random_rows(most + 1, inputs)))
    x = random_rows(most, inputs)
    result, wanted = screened(x), full(x)
    torch.testing.assert_close(result.amax(1), wanted.amax(1))
    assert torch.equal(result.argmax(1), wanted.argmax(1))
    assert 0.05 < (result - wanted).norm() / wanted.norm() < 0.2


@pytest.mark.parametrize("num_outputs", [30, QUANTIZED_AT_ONCE + 30])
def test_a_weight_of_4_bits_is_close_and_says_how_close(num_outputs: int) -> None:
    """Of rows with one large weight, too, and of zeros."""
    weight = torch.randn(num_outputs, 256, generator=torch.Generator().manual_seed(0))
    weight[7], weight[8], weight[9, 5] = 0, weight[8] / 100, 30
    packed, scales, deviations, spreads = quantize_to_nibbles(weight)
    assert (packed.shape, scales.shape) == ((num_outputs, 128), (num_outputs,))
    integers = unpack_nibbles(packed).float()
    errors = (integers * scales[:, None] - weight).square().sum(1) / weight.square().sum(1).clamp(min=1e-30)
    assert bool((errors[[i for i in range(num_outputs) if i != 9]] < 0.03).all())
    others = weight[9].square().sum() - 900
    assert errors[9] < others / (others + 900), "better than the large weight alone"
    given = integers * scales[:, None]
    torch.testing.assert_close(deviations, (given - weight).square().mean(1).sqrt(), rtol=1e-3, atol=1e-9)
    of_inputs = given.square().sum(1).mean() / 12 / deviations.square().mean()
    expected = torch.stack((torch.ones(()), of_inputs)) * DEVIATIONS**2
    torch.testing.assert_close(spreads, expected, rtol=1e-3, atol=0)


def test_a_loud_input_hides_no_greatest_output() -> None:
    """Final norms have such, and errors of their weights are the same for every row."""
    weight = random_linear(2000, 512).weight
    x = random_rows(8, 512)
    x[:, 7] = 30
    full = Linear(weight)
    screened = Linear(int4_screened_weight(weight, DenseWeight(weight)))
    assert torch.equal(screened(x).argmax(1), full(x).argmax(1))
