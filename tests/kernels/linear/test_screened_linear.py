"""4 bits that say which outputs could be the greatest, and these in full: against float64."""

import pytest
import torch

from headway.kernels import pack_nibbles
from headway.kernels.linear.screened_linear import screened_linear
from headway.kernels.types._int4_packing import unpack_nibbles

DEVIATIONS = 2.5


def screen_of(
    outputs: int, inputs: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """(weight, packed, scales, errors, spreads), the weight normally distributed."""
    generator = torch.Generator().manual_seed(outputs)
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype)
    scales = weight.float().std(1) * torch.linspace(0.3, 0.4, outputs)
    steps = weight.float() / scales[:, None]
    integers = steps.round().clamp(-8, 7)
    errors = (integers - steps).square().mean(1).sqrt() * scales
    of_inputs = (integers * scales[:, None]).square().sum() / 12 / outputs / errors.square().mean()
    spreads = DEVIATIONS**2 * torch.stack((torch.ones(()), of_inputs))
    tensors = weight, pack_nibbles(integers), scales, errors, spreads
    return tuple(tensor.to(device) for tensor in tensors)


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def rows_of(rows: int, inputs: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(
        device, dtype_of(device)
    )


def about_of(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([rows, 1], [rows, outputs]) float64: of what the inputs become multiples, and what 4 bits of the
    weight give."""
    step = x.float().abs().amax(1, keepdim=True) / 127
    rounded = (x.float() / step + 0.5).floor().double() * step.double()
    return step.double(), rounded @ (unpack_nibbles(packed).double() * scales.double()[:, None]).T


def test_numbers_of_4_bits_come_back() -> None:
    integers = torch.arange(-8, 8).repeat(3, 32)
    integers[1] = integers[1].flip(0)
    packed = pack_nibbles(integers)
    assert (packed.shape, packed.dtype) == ((3, 256), torch.int8)
    assert torch.equal(unpack_nibbles(packed), integers.to(torch.int8))


@pytest.mark.parametrize("rows", [0, 1, 3, 5, 16, 17, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 256), (700, 512), (2200, 256)])
def test_the_greatest_is_exact_and_all_others_are_about_right(
    rows: int, outputs: int, inputs: int, device: torch.device
) -> None:
    dtype = dtype_of(device)
    weight, packed, scales, errors, spreads = screen_of(outputs, inputs, device, dtype)
    x = rows_of(rows, inputs + 8, device)[:, 8:]
    exact = x.double() @ weight.double().T
    result = screened_linear(x, weight, packed, scales, errors, spreads)
    assert (result.dtype, result.shape) == (dtype, (rows, outputs))
    if rows == 0:
        return
    rounding = max(torch.finfo(dtype).eps, 1e-5)
    step, about = about_of(x, packed, scales)
    # Of two neighbours one may have been taken for the other, once.
    is_about = (result.double() - about).abs() <= rounding * about.abs() + 8 * scales.double() * step
    is_exact = (result.double() - exact).abs() <= rounding * (exact.abs() + 1)
    assert bool((is_about | is_exact).all())
    off = (
        errors.double()
        * (spreads[0] * x.double().square().sum(1, keepdim=True) + spreads[1] * step**2).sqrt()
    )
    bar = (about - off).amax(1, keepdim=True)
    tile = torch.arange(outputs, device=device) // 128
    could_be = (about + off >= bar - 0.02).long()
    in_tile = torch.zeros(rows, outputs, dtype=torch.int64, device=device).index_add_(1, tile, could_be)
    assert bool(is_exact[(about + off >= bar + 0.02) & (in_tile[:, tile] <= 8)].all())
    assert bool(is_about[about + off < bar - 0.02].all())
    greatest = exact.gather(1, result.double().argmax(1, keepdim=True))
    assert bool((greatest >= exact.amax(1, keepdim=True) - 2 * rounding * exact.abs().amax()).all())
    assert 0.5 < (about - exact).std() / (off.mean() / DEVIATIONS) < 2, "the spread is what was said"


def test_where_nothing_is_sure_the_greatest_few_are_exact(device: torch.device) -> None:
    """Eight of each 128, the last of which are not all there."""
    weight, packed, scales, errors, _ = screen_of(300, 256, device, dtype_of(device))
    x = rows_of(5, 256, device)
    ones = torch.ones_like(weight)
    _, about = about_of(x, packed, scales)
    unsure = torch.full((2,), 1e9, device=device)
    result = screened_linear(x, ones, packed, scales, errors, unsure).double()
    is_about = (result - about).abs() < 0.03
    is_exact = (result - x.double().sum(1, keepdim=True)).abs() < 0.2
    assert bool((is_about | is_exact).all())
    for first in (0, 128, 256):
        some = slice(first, first + 128)
        ninth = about[:, some].topk(9).values[:, -1:]
        # Who is greatest is seen as the result's type has it.
        assert bool(is_exact[:, some][about[:, some] > ninth + 0.03].all())
        assert bool((is_about[:, some].sum(1) >= min(128, 300 - first) - 8).all())


def test_sure_outputs_and_rows_of_zeros_need_no_second_look(device: torch.device) -> None:
    """Weights that are no numbers would show it."""
    _, packed, scales, errors, spreads = screen_of(300, 256, device, dtype_of(device))
    none = torch.full((300, 256), float("nan"), device=device, dtype=dtype_of(device))
    x = rows_of(3, 256, device)
    _, about = about_of(x, packed, scales)
    result = screened_linear(x, none, packed, scales, errors, torch.zeros(2, device=device)).double()
    assert bool(((result - about).abs() < 0.03).all())
    assert bool((screened_linear(x * 0, none, packed, scales, errors, spreads) == 0).all())


@pytest.mark.parametrize("rows", [2, 20])
def test_given_memory_is_filled_and_its_margins_stay(rows: int, device: torch.device) -> None:
    backing = torch.full((rows + 2, 400), 7.0, device=device, dtype=dtype_of(device))
    screen = screen_of(300, 256, device, dtype_of(device))
    x = rows_of(rows, 256, device)
    out = backing[1:-1, 20:320]
    assert screened_linear(x, *screen, out=out) is out
    assert torch.equal(out, screened_linear(x, *screen))
    assert bool((backing[[0, -1]] == 7).all())
    assert bool((backing[:, :20] == 7).all())
    assert bool((backing[:, 320:] == 7).all())


@pytest.mark.filterwarnings("ignore:.*(NaN|invalid value)")
def test_numbers_that_are_none_lead_nowhere_else(device: torch.device) -> None:
    """A row of them harms no other row."""
    screen = screen_of(300, 256, device, dtype_of(device))
    x = rows_of(3, 256, device)
    wanted = screened_linear(x, *screen)
    x[1] = float("nan")
    result = screened_linear(x, *screen)
    assert torch.equal(result[[0, 2]], wanted[[0, 2]])
