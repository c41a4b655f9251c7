"""Weights in 8 bits on a CPU: exactly the products of the integers that they are rounded to."""

from __future__ import annotations

import pytest
import torch

from headway.kernels import Activation, has_int8_products, int8_cpu_weight, linear

pytestmark = pytest.mark.skipif(not has_int8_products(), reason="needs an x86 CPU with AVX2")

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
    return weight


def by_integers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in sums of float64, which are exact."""
    weight_scales = (weight.abs().amax(1) / 127).clamp(min=1e-30)
    integers = (weight / weight_scales[:, None]).round().double()
    scales = (x.abs().amax(1, keepdim=True) / 64).clamp(min=1e-30)
    first = (x / scales).round()
    second = ((x / scales - first) * 128).round()
    sums = [(part.double() @ integers.T).float() * weight_scales for part in (first, second)]
    return (sums[0] + sums[1] / 128) * scales


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("out_size", "in_size"), SIZES, ids=str)
def test_any_number_of_rows_and_threads_gives_the_sums_of_integers(
    out_size: int, in_size: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, rows = random_weight(out_size, in_size), random_rows(512, in_size)
    packed, wanted = int8_cpu_weight(weight), by_integers(rows, weight)
    for count in (*range(1, 34), 64, 100, 512) if threads == 1 else (1, 2, 3, 4, 5, 8, 17, 64, 512):
        for some, expected in ((rows[:count], wanted[:count]), (rows[-count:], wanted[-count:])):
            assert torch.equal(linear(Activation(some), packed).values, expected), count


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_products_are_not_cut(sign: float) -> None:
    weight = torch.full((8, LARGEST_SIZE), sign)
    x = torch.ones(2, LARGEST_SIZE)
    x[1] = -1
    found = linear(Activation(x), int8_cpu_weight(weight)).values
    assert torch.equal(found, by_integers(x, weight))
    torch.testing.assert_close(found, torch.tensor([[1.0], [-1.0]]).expand(2, 8) * sign * LARGEST_SIZE)


def test_a_row_keeps_14_bits_of_its_largest_input() -> None:
    x = random_rows(64, 256)
    found = linear(Activation(x), int8_cpu_weight(torch.eye(256))).values
    assert bool(((found - x).abs() <= x.abs().amax(1, keepdim=True) * 2.0**-14 * 1.01 + 1e-30).all())


def test_no_rows_give_none_and_a_stride_changes_nothing() -> None:
    packed = int8_cpu_weight(random_weight(7, 5))
    x = random_rows(6, 10)[:, ::2]
    assert linear(Activation(x[:0]), packed).values.shape == (0, 7)
    assert torch.equal(linear(Activation(x), packed).values, linear(Activation(x.clone()), packed).values)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_row_alone(value: float) -> None:
    packed, x = int8_cpu_weight(random_weight(7, 5)), random_rows(9, 5)
    before = linear(Activation(x), packed).values
    x[2, 1] = value
    after = linear(Activation(x), packed).values
    assert not bool(after[2].isfinite().any())
    others = [row for row in range(9) if row != 2]
    assert torch.equal(after[others], before[others])


def test_packing_leaves_the_engine_of_quantised_operations_as_it_was() -> None:
    before = torch.backends.quantized.engine
    int8_cpu_weight(torch.eye(3))
    assert torch.backends.quantized.engine == before
