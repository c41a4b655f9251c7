"""One call for every weight format and epilogue, against float64; and what callers ask about the choice of
kernels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from headway_testing.products import ACTIVATIONS, tensors

from headway.kernels import (
    Activation,
    DeferredNorm,
    DenseWeight,
    Epilogue,
    Float8Weight,
    Int4ScreenedWeight,
    IntegerCpuWeight,
    NextNorm,
    PackedCpuWeight,
    Weight,
    adds_residual,
    can_be_packed,
    defers_norm,
    fuses_qkv,
    has_integer_products,
    integer_cpu_weight,
    least_packed_rows,
    linear,
    pack_nibbles,
    pack_weight,
)
from headway.kernels.types._deferred_norm import square_tiles

OUTPUTS, INPUTS = 128, 256
FORMATS = ("dense", "batch-invariant", "float8", "int4", "packed")
FORMATS += ("cpu-int8", "cpu-int4") if has_integer_products() else ()
# Triton's interpreter rounds to float8 less exactly than a device.
TOLERANCES = {"float8": 0.2, "int4": 0.3, "cpu-int8": 0.02, "cpu-int4": 0.15}


def weight_of(kind: str, exact: torch.Tensor) -> Weight:
    if kind == "packed":
        rows = least_packed_rows(exact, None) if can_be_packed(exact) else None
        return DenseWeight(exact) if rows is None else pack_weight(exact, least_rows=rows)
    if kind.startswith("cpu-int"):
        return integer_cpu_weight(exact, bits=8 if kind == "cpu-int8" else 4)
    if kind == "float8":
        return Float8Weight(
            exact.to(torch.float8_e4m3fn), torch.ones(1), torch.full((1,), 2.0**-6), exact.dtype
        )
    if kind == "int4":
        scales = exact.abs().amax(1) / 7
        integers = (exact / scales[:, None]).round()
        errors = (integers * scales[:, None] - exact).square().mean(1).sqrt()
        return Int4ScreenedWeight(
            exact, pack_nibbles(integers), scales, errors, torch.full((2,), 36.0), DenseWeight(exact)
        )
    return DenseWeight(exact, is_batch_invariant=kind == "batch-invariant")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def assert_about(found: torch.Tensor, wanted: torch.Tensor, kind: str) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).norm() <= TOLERANCES.get(kind, 1e-5) * wanted.norm()


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_multiplied_and_added(kind: str, rows: int) -> None:
    x, exact = tensors(rows, OUTPUTS, INPUTS, torch.device("cpu"))
    weight, residual = weight_of(kind, exact), random(rows, OUTPUTS)
    wanted = x.double() @ exact.double().T
    assert_about(linear(Activation(x), weight).values, wanted, kind)
    out = torch.empty(rows, OUTPUTS)
    assert linear(Activation(x), weight, out=out).values is out
    assert_about(out, wanted, kind)
    found = linear(Activation(x), weight, Epilogue(residual=residual.clone()), out=residual).values
    assert found is residual
    assert_about(found - random(rows, OUTPUTS), wanted, kind)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("float8", "int4")])
def test_a_bias_and_a_gated_activation(kind: str) -> None:
    x, exact = tensors(5, OUTPUTS, INPUTS, torch.device("cpu"))
    weight, bias = weight_of(kind, exact), random(OUTPUTS)
    for given, activation in product((None, bias), ACTIVATIONS):
        wanted = x.double() @ exact.double().T + (0 if given is None else given.double())
        assert_about(linear(Activation(x), weight, Epilogue(given)).values, wanted, kind)
        gate, up = wanted.chunk(2, dim=1)
        found = linear(Activation(x), weight, Epilogue(given, activation)).values
        assert_about(found, ACTIVATIONS[activation](gate) * up, kind)


def test_inputs_in_float8_are_not_rounded_again() -> None:
    x, exact = tensors(5, OUTPUTS, INPUTS, torch.device("cpu"))
    weight = weight_of("float8", exact)
    assert isinstance(weight, Float8Weight)
    rounded = (x / weight.step).to(torch.float8_e4m3fn)
    inputs, values = rounded.double() * weight.step.double(), weight.values.double()
    found = linear(Activation(rounded), weight, Epilogue(random(OUTPUTS))).values
    assert found.dtype == torch.float32
    assert_about(found, inputs @ values.T + random(OUTPUTS).double(), "dense")


def test_more_rows_than_4_bits_are_good_for_read_the_other_weight() -> None:
    x, exact = tensors(40, OUTPUTS, INPUTS, torch.device("cpu"))
    weight = weight_of("int4", exact)
    for rows, is_exact in ((8, False), (9, True)):
        found = linear(Activation(x[:rows]), weight).values
        wanted = linear(Activation(x[:rows]), DenseWeight(exact)).values
        assert torch.equal(found, wanted) is is_exact


def test_a_norm_is_deferred_from_one_product_to_the_next() -> None:
    x, exact = tensors(5, INPUTS, INPUTS, torch.device("cpu"))
    residual, gain, bias = random(5, INPUTS), random(INPUTS), random(INPUTS)
    stream = residual.double() + x.double() @ exact.double().T + bias.double()
    for unit_offset in (False, True):
        written = residual.clone()
        epilogue = Epilogue(bias, residual=written, next_norm=NextNorm(gain, 1e-5, unit_offset))
        scaled = linear(Activation(x), DenseWeight(exact), epilogue)
        assert scaled.deferred is not None
        assert_about(written, stream, "dense")
        normed = (
            stream * (stream.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (gain.double() + unit_offset)
        )
        _, reader = tensors(5, OUTPUTS, INPUTS, torch.device("cpu"))
        for activation, given in product((None, *ACTIVATIONS), (None, random(OUTPUTS))):
            wanted = normed @ reader.double().T + (0 if given is None else given.double())
            if activation is not None:
                gate, up = wanted.chunk(2, dim=1)
                wanted = ACTIVATIONS[activation](gate) * up
            found = linear(scaled, DenseWeight(reader), Epilogue(given, activation))
            assert_about(found.values, wanted, "dense")


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_formats_that_know_no_deferred_norm_refuse_it(kind: str) -> None:
    x, exact = tensors(2, OUTPUTS, INPUTS, torch.device("cpu"))
    weight = PackedCpuWeight(exact, 1) if kind == "packed" else weight_of(kind, exact)
    norm = DeferredNorm(torch.ones(2, square_tiles(INPUTS)), 1e-5)
    with pytest.raises(AssertionError, match="norm is complete"):
        linear(Activation(x, norm), weight)
    if isinstance(weight, IntegerCpuWeight):  # completes norms
        return
    epilogue = Epilogue(residual=random(2, OUTPUTS), next_norm=NextNorm(random(OUTPUTS), 1e-5))
    with pytest.raises(AssertionError, match="defers no norm"):
        linear(Activation(x), weight, epilogue)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cpu_fuses_norms_with_products_of_integers_alone(kind: str) -> None:
    x, exact = tensors(4, INPUTS, INPUTS, torch.device("cpu"))
    weight = weight_of(kind, exact)
    assert not adds_residual(x, weight, has_bias=False)
    assert defers_norm(x.bfloat16(), weight, weight) == isinstance(weight, IntegerCpuWeight)
    assert not fuses_qkv(Activation(x), weight)
