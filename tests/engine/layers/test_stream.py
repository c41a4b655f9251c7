"""The residual stream: additions and norms give what they would one by one, in the form that the reader
wants."""

from __future__ import annotations

import pytest
import torch

from headway.engine.layers import stream as stream_module
from headway.engine.layers.linear import Linear
from headway.engine.layers.norm import RMSNorm
from headway.engine.layers.stream import ResidualStream
from headway.engine.layers.weights import float8_weight
from headway.engine.models.spec import NormSpec

HIDDEN, INNER, EPSILON = 64, 128, 1e-3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def norm_of(seed: int, *, unit_offset: bool = False) -> RMSNorm:
    return RMSNorm(random(HIDDEN, seed=seed), NormSpec(EPSILON, unit_offset))


def exact_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    factor = norm.weight + 1 if norm.spec.unit_offset else norm.weight
    return x * (x.square().mean(1, keepdim=True) + EPSILON).rsqrt() * factor


@pytest.mark.parametrize("is_fused", [False, True], ids=["single-launches", "fused"])
@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "one-plus-weight"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_additions_and_norms_alternate(
    scale: float, has_bias: bool, unit_offset: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "defers_norm", lambda *_: is_fused)
    writer = Linear(random(HIDDEN, INNER, seed=1), random(HIDDEN, seed=2) if has_bias else None)
    reader = Linear(random(INNER, HIDDEN, seed=3))
    first, second = norm_of(4, unit_offset=unit_offset), norm_of(5, unit_offset=unit_offset)
    start, x = random(3, HIDDEN, seed=6), random(3, INNER, seed=7)
    stream = ResidualStream(start.clone(), scale)
    torch.testing.assert_close(stream.normed(first, reader).values, exact_norm(start, first))

    product = x @ writer.weight.T + (0 if writer.bias is None else writer.bias)
    after = start + scale * product
    stream.add(x, writer)
    found = stream.normed(second, reader)
    assert (found.deferred is not None) is (is_fused and scale == 1)
    wanted = exact_norm(after, second) @ reader.weight.T
    torch.testing.assert_close(reader(found), wanted, rtol=0, atol=1e-4)  # deferred factors are float32
    stream.add(x, writer)
    torch.testing.assert_close(stream.sum(), after + scale * product)
    torch.testing.assert_close(stream.sum(), after + scale * product)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_norms_of_products_and_complete_results_are_added(scale: float) -> None:
    writer, of_product, norm = Linear(random(HIDDEN, INNER, seed=1)), norm_of(2), norm_of(3)
    start, x, complete = random(3, HIDDEN, seed=4), random(3, INNER, seed=5), random(3, HIDDEN, seed=6)
    stream = ResidualStream(start.clone(), scale)
    stream.add(x, writer, of_product)
    wanted = start + scale * exact_norm(x @ writer.weight.T, of_product)
    torch.testing.assert_close(stream.normed(norm, writer).values, exact_norm(wanted, norm))
    given = complete.clone()
    stream.add_computed(given)
    torch.testing.assert_close(stream.sum(), wanted + scale * complete)
    assert torch.equal(given, complete)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_tap_is_a_copy_that_changes_no_bit_of_what_follows(dtype: torch.dtype) -> None:
    writer, norm = Linear(random(HIDDEN, INNER, seed=1).to(dtype)), norm_of(2)
    norm = RMSNorm(norm.weight.to(dtype), norm.spec)
    results = []
    for is_tapped in (False, True):
        stream = ResidualStream(random(3, HIDDEN, seed=3).to(dtype))
        stream.add(random(3, INNER, seed=4).to(dtype), writer)
        tapped = stream.tap() if is_tapped else None
        normed = stream.normed(norm, writer).values
        stream.add(random(3, INNER, seed=5).to(dtype), writer)
        if tapped is not None:
            assert torch.equal(tapped, results[0][2])
        between = ResidualStream(random(3, HIDDEN, seed=3).to(dtype))
        between.add(random(3, INNER, seed=4).to(dtype), writer)
        results.append((normed, stream.sum(), between.sum()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_the_first_norm_looks_tokens_up() -> None:
    embedding, norm = random(9, HIDDEN), norm_of(1)
    tokens = torch.tensor([3, 0, 8, 3])
    stream = ResidualStream.of_tokens(tokens, embedding)
    with pytest.raises(AssertionError, match="no layer has read"):
        stream.sum()
    torch.testing.assert_close(stream.normed(norm).values, exact_norm(embedding[tokens], norm))
    assert torch.equal(stream.sum(), embedding[tokens])


def test_a_reader_in_float8_gets_multiples_of_its_step() -> None:
    norm, start = norm_of(1), random(3, HIDDEN)
    reader = Linear(float8_weight(random(INNER, HIDDEN), largest_input=32.0))
    writer = Linear(random(HIDDEN, INNER, seed=1))
    stream = ResidualStream(start.clone())
    for wanted in (start, start + random(3, INNER) @ writer.weight.T):
        found = stream.normed(norm, reader).values
        assert found.dtype == torch.float8_e4m3fn
        assert reader.input_step is not None
        exact = exact_norm(wanted, norm)
        error = (found.double() * reader.input_step.double() - exact).abs()
        assert bool((error <= exact.abs() / 16 + reader.input_step * 2**-9).all())
        stream.add(random(3, INNER), writer)


def test_no_two_additions_follow_one_another() -> None:
    stream, writer = ResidualStream(random(2, HIDDEN)), Linear(random(HIDDEN, INNER))
    stream.add(random(2, INNER), writer)
    with pytest.raises(AssertionError, match="between two additions"):
        stream.add(random(2, INNER), writer)
