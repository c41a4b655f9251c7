"""Weights in 4 and 8 bits on a CPU: blocks as GGUF files have them, and exactly the sums of groups."""

from __future__ import annotations

from typing import Literal

import gguf
import numpy as np
import pytest
import torch

from headway.kernels import (
    Activation,
    Epilogue,
    IntegerCpuWeight,
    NextNorm,
    has_integer_products,
    integer_cpu_bytes,
    integer_cpu_weight,
    linear,
)
from headway.kernels.reference.elementwise.rms_norm import rms_norm

needs_products = pytest.mark.skipif(
    not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler"
)
of_both = pytest.mark.parametrize("bits", [4, 8])
SIZES = [(1408, 256), (256, 704), (151, 48), (101, 41), (64, 2048), (7, 5), (1, 1)]
LARGEST_SIZE = 4096  # of a row of alternating signs: what saturation or few bits of a sum would show


def random_rows(count: int, in_size: int) -> torch.Tensor:
    """Rows of very different sizes, one of them of zeros, another with one large input."""
    rows = torch.randn(count, in_size, generator=torch.Generator().manual_seed(1))
    rows *= 10.0 ** (torch.arange(count)[:, None] % 9 - 4)
    rows[3 % count] = 0
    rows[4 % count, 0] = 1e4
    return rows


def random_weight(out_size: int, in_size: int) -> torch.Tensor:
    weight = torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(0))
    weight[-1] *= 100
    weight[0, : in_size // 2] = 0
    return weight


def blocks_of(weight: IntegerCpuWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes [out, groups, 32], scales and minimums [out, groups], all float32."""
    halves = weight.tiles[:, :, : 16 * (2 if weight.bits == 4 else 1)].clone().view(torch.float16).float()
    codes = weight.tiles[:, :, halves.shape[2] * 2 :]
    if weight.bits == 4:
        vectors = codes.unflatten(2, (4, 1, 32))
        codes = torch.cat([vectors & 15, vectors >> 4], 3).flatten(2)
    codes = codes.view(torch.int8).unflatten(2, (8, 8, 4)).permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)
    by_output = halves.unflatten(2, (-1, 8)).permute(2, 0, 3, 1).flatten(1, 2)[:, : weight.num_outputs]
    minimums = by_output[1] if weight.bits == 4 else torch.zeros_like(by_output[0])
    return codes[: weight.num_outputs].float(), by_output[0], minimums


def by_groups(x: torch.Tensor, weight: IntegerCpuWeight) -> torch.Tensor:
    """The product by single operations of PyTorch, group after group."""
    codes, scales, minimums = blocks_of(weight)
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = groups.abs().amax(2)
    inverse = (torch.full_like(largest, 127) / largest).masked_fill(largest == 0, 0)
    rounded = (groups * inverse[..., None]).round()
    steps = largest / 127
    sums = steps * rounded.sum(2)
    product = torch.zeros(len(x), len(codes))
    for group in range(groups.shape[1]):
        integers = rounded[:, group] @ codes[:, group].T  # below 2 ** 24: exact
        product = product + integers * scales[:, group] * steps[:, group, None]
        product = product + minimums[:, group] * sums[:, group, None]
    return product


@needs_products
@of_both
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("out_size", "in_size"), SIZES, ids=str)
def test_any_number_of_rows_and_threads_gives_the_sums_of_groups(
    out_size: int, in_size: int, threads: int, bits: int
) -> None:
    torch.set_num_threads(threads)
    packed, rows = integer_cpu_weight(random_weight(out_size, in_size), bits=bits), random_rows(100, in_size)
    wanted = by_groups(rows, packed)
    for count in (*range(1, 10), 17, 33, 64, 100):
        for some, expected in ((rows[:count], wanted[:count]), (rows[-count:], wanted[-count:])):
            assert torch.equal(linear(Activation(some), packed).values, expected), count


@needs_products
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0])
def test_a_weight_of_a_gguf_file_gets_its_blocks_back(kind: gguf.GGMLQuantizationType) -> None:
    is_of_4_bits = kind is gguf.GGMLQuantizationType.Q4_1
    stored = gguf.quants.quantize(random_weight(96, 512).numpy(), kind)
    weight = torch.from_numpy(gguf.quants.dequantize(stored, kind))
    codes, scales, minimums = blocks_of(integer_cpu_weight(weight, bits=4 if is_of_4_bits else 8))
    blocks = stored.reshape(96, 16, -1)
    halves = blocks[:, :, : 4 if is_of_4_bits else 2].copy().view(np.float16)
    assert np.array_equal(halves[:, :, 0], scales.numpy())
    if is_of_4_bits:
        nibbles = np.concatenate([blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4], 2)
        assert np.array_equal(halves[:, :, 1], minimums.numpy())
        assert np.array_equal(nibbles, codes.numpy())
    else:
        assert np.array_equal(blocks[:, :, 2:].view(np.int8), codes.numpy())


@of_both
def test_a_weight_is_rounded_to_the_nearest_code(bits: int) -> None:
    weight = random_weight(101, 96)
    codes, scales, minimums = blocks_of(integer_cpu_weight(weight, bits=bits))
    rounded = (codes * scales[..., None] + minimums[..., None]).flatten(1)
    # A scale and a minimum have 11 bits.
    limit = scales / 2 + (minimums.abs() + scales * (15 if bits == 4 else 127)) * 2.0**-11
    assert bool(((rounded - weight).abs() <= limit.repeat_interleave(32, 1) + 1e-30).all())


@needs_products
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [96, 42])
def test_a_norm_after_the_addition_and_a_gate_are_those_of_the_twins(
    size: int, has_bias: bool, unit_offset: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    x, bias = random_rows(40, size), random_rows(1, size)[0] if has_bias else None
    packed = integer_cpu_weight(random_weight(size, size) / size, bits=4)
    product = linear(Activation(x), packed, Epilogue(bias)).values
    before, weight = torch.randn(40, size, generator=torch.Generator().manual_seed(2)), torch.rand(size)
    norm, results = NextNorm(weight, 1e-5, unit_offset), []
    for own in (slice(0, 40), slice(7, 8), slice(30, 39)):
        residual = before[own].clone()
        found = linear(Activation(x[own]), packed, Epilogue(bias, residual=residual, next_norm=norm)).values
        assert torch.equal(residual, before[own] + product[own])
        wanted = rms_norm(residual, weight, 1e-5, unit_offset=unit_offset)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-7)
        gated = linear(Activation(x[own]), packed, Epilogue(bias, "silu")).values
        halves = product[own].double().chunk(2, 1)
        wanted = torch.nn.functional.silu(halves[0]) * halves[1]
        torch.testing.assert_close(gated.double(), wanted, rtol=2e-6, atol=1e-30)
        results.append((found, gated))
        assert torch.equal(found, results[0][0][own])
        assert torch.equal(gated, results[0][1][own])


@needs_products
@of_both
@pytest.mark.parametrize("shape", [(8, 32), (13, 42), (4100, 64)])
def test_the_bytes_of_a_weight_are_known_beforehand(shape: tuple[int, int], bits: Literal[4, 8]) -> None:
    assert (
        integer_cpu_bytes(shape, bits=bits)
        == integer_cpu_weight(random_weight(*shape), bits=bits).tiles.nbytes
    )


@needs_products
@of_both
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_products_are_not_cut(sign: float, bits: int) -> None:
    weight = torch.full((8, LARGEST_SIZE), sign)
    weight[:, ::32] = 0  # else a group of 4 bits is its minimum
    x = torch.ones(2, LARGEST_SIZE)
    x[1] = -1
    packed = integer_cpu_weight(weight, bits=bits)
    found = linear(Activation(x), packed).values
    assert torch.equal(found, by_groups(x, packed))
    torch.testing.assert_close(found, x @ weight.T, rtol=1e-3, atol=1e-3)


@needs_products
@of_both
def test_no_rows_give_none_and_a_stride_changes_nothing(bits: int) -> None:
    packed = integer_cpu_weight(random_weight(7, 5), bits=bits)
    x = random_rows(6, 10)
    assert linear(Activation(x[:0, :5]), packed).values.shape == (0, 7)
    for some in (x[:, ::2], x[:, :5], x[::2, :5]):
        assert torch.equal(
            linear(Activation(some), packed).values, linear(Activation(some.clone()), packed).values
        )


@needs_products
@of_both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row_alone(value: float, bits: int) -> None:
    packed, x = integer_cpu_weight(random_weight(7, 5), bits=bits), random_rows(9, 5)
    before = linear(Activation(x), packed).values
    x[2, 1] = value
    after = linear(Activation(x), packed).values
    assert not bool(after[2].isfinite().any())
    others = [row for row in range(9) if row != 2]
    assert torch.equal(after[others], before[others])


@needs_products
@of_both
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(13, 42), (256, 512)])
def test_codes_are_the_nearest_of_a_plain_calculation(
    shape: tuple[int, int], threads: int, bits: Literal[4, 8]
) -> None:
    torch.set_num_threads(threads)
    weight = random_weight(*shape)
    codes, scales, minimums = blocks_of(integer_cpu_weight(weight, bits=bits))
    groups = torch.nn.functional.pad(weight, (0, -shape[1] % 32)).view(shape[0], -1, 32)
    shift = groups.amin(2).half() if bits == 4 else torch.zeros(groups.shape[:2]).half()
    largest = groups.amax(2) - groups.amin(2) if bits == 4 else groups.abs().amax(2)
    scale = (largest / (15 if bits == 4 else 127)).half()
    wanted = (groups - shift.float()[:, :, None]) / scale.float()[:, :, None]
    low = 0 if bits == 4 else -127
    wanted = wanted.nan_to_num(0).round().clamp(low, 15 if bits == 4 else 127)
    assert torch.equal(codes, wanted)
    assert torch.equal(scales.half(), scale)
    assert torch.equal(minimums.half(), shift)


@needs_products
@of_both
@pytest.mark.parametrize("place", [0, 7, 8, 31])
def test_what_is_no_number_stays_none(place: int, bits: Literal[4, 8]) -> None:
    weight = random_weight(8, 64)
    weight[2, place] = torch.nan
    found = linear(Activation(torch.ones(1, 64)), integer_cpu_weight(weight, bits=bits)).values
    assert found.isnan().tolist() == [[output == 2 for output in range(8)]]
