"""add_linear against a product in float64, and with it the norm that the product behind it completes."""

import pytest
import torch
from headway_testing.products import assert_near, tensors

from headway.kernels import rms_norm
from headway.kernels.linear.add_linear import add_linear
from headway.kernels.linear.gated_linear import gated_linear

EPSILON = 1e-3
ROWS = {"one": 1, "window": 4, "odd": 19, "most": 32, "beyond": 65}
# Hidden x inputs: whole sums, split sums, an odd end, inputs that only the smaller cut divides, the twin's.
SHAPES = {
    "whole": (192, 256),
    "split": (64, 2048),
    "odd": (200, 256),
    "narrow-cut": (70, 192),
    "library": (64, 100),
}


def norm_weight(hidden: int, like: torch.Tensor) -> torch.Tensor:
    return (1 + torch.randn(hidden, generator=torch.Generator().manual_seed(1)) / 4).to(like)


def stream(rows: int, hidden: int, like: torch.Tensor) -> torch.Tensor:
    """Not of variance 1, or a norm would change little."""
    return 5 * torch.randn(rows, hidden, generator=torch.Generator().manual_seed(2)).to(like)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("hidden", "inputs"), SHAPES.values(), ids=SHAPES)
def test_the_stream_grows_and_is_normed_later(
    rows: int, hidden: int, inputs: int, device: torch.device
) -> None:
    x, weight = tensors(rows, hidden, inputs, device)
    residual, gain = stream(rows, hidden, x), norm_weight(hidden, x)
    expected = residual.double() + x.double() @ weight.double().T
    scaled, norm = add_linear(x, weight, residual, gain, EPSILON)
    assert_near(residual, expected)
    assert_near(scaled, expected * gain.double())
    factor = norm.factor(hidden)
    assert_near((scaled * factor).to(x.dtype), rms_norm(residual.double(), gain.double(), EPSILON))
    exact = torch.rsqrt(residual.double().square().mean(1, keepdim=True) + EPSILON)
    torch.testing.assert_close(factor.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "one-plus-weight"])
@pytest.mark.parametrize(("hidden", "inputs"), SHAPES.values(), ids=SHAPES)
def test_a_bias_and_an_offset_of_the_norm(
    hidden: int, inputs: int, unit_offset: bool, device: torch.device
) -> None:
    x, weight = tensors(5, hidden, inputs, device)
    residual, gain = stream(5, hidden, x), norm_weight(hidden, x)
    bias = torch.randn(hidden, generator=torch.Generator().manual_seed(3)).to(x)
    expected = residual.double() + x.double() @ weight.double().T + bias.double()
    scaled, norm = add_linear(x, weight, residual, gain, EPSILON, bias=bias, unit_offset=unit_offset)
    assert_near(residual, expected)
    assert_near(scaled, expected * (gain.double() + unit_offset))
    exact = torch.rsqrt(residual.double().square().mean(1, keepdim=True) + EPSILON)
    torch.testing.assert_close(norm.factor(hidden).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("hidden", [192, 200, 2304], ids=str)
def test_a_gated_product_completes_the_norm(rows: int, hidden: int, device: torch.device) -> None:
    x, weight = tensors(rows, hidden, 256, device)
    _, gate_up = tensors(rows, 2 * 96, hidden, device)
    residual, gain = stream(rows, hidden, x), norm_weight(hidden, x)
    scaled, norm = add_linear(x, weight, residual, gain, EPSILON)
    normed = rms_norm(residual.double(), gain.double(), EPSILON)
    gate, up = (normed @ gate_up.double().T).chunk(2, dim=1)
    assert_near(gated_linear(scaled, gate_up, norm=norm), torch.nn.functional.silu(gate) * up)


def test_a_row_of_nan_stays_alone(device: torch.device) -> None:
    x, weight = tensors(6, 128, 2048, device)
    _, gate_up = tensors(6, 2 * 64, 128, device)
    residual, gain = stream(6, 128, x), norm_weight(128, x)
    poisoned_x, poisoned_residual = x.clone(), residual.clone()
    poisoned_x[2], poisoned_residual[4] = torch.nan, torch.nan
    results = []
    for inputs, total in ((x, residual), (poisoned_x, poisoned_residual)):
        scaled, norm = add_linear(inputs, weight, total, gain, EPSILON)
        results.append((total, gated_linear(scaled, gate_up, norm=norm)))
    clean = [0, 1, 3, 5]
    for whole, poisoned in zip(*results, strict=True):
        assert torch.equal(whole[clean], poisoned[clean])
        assert bool(poisoned[[2, 4]].isnan().all())


def test_rows_of_a_wider_stream(device: torch.device) -> None:
    x, weight = tensors(3, 128, 256, device)
    wide = stream(3, 160, x)
    before = wide.clone()
    add_linear(x, weight, wide[:, 16:144], norm_weight(128, x), EPSILON)
    assert_near(wide[:, 16:144], before[:, 16:144].double() + x.double() @ weight.double().T)
    assert torch.equal(wide[:, :16], before[:, :16])
    assert torch.equal(wide[:, 144:], before[:, 144:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("hidden", "inputs", "inner"),
    [
        (4096, 4096, 11008),
        (4096, 11008, 512),
        (1024, 1024, 3072),
        (1024, 3072, 96),
        (8192, 1024, 96),
        (896, 4864, 96),
    ],
    ids=str,
)
def test_a_row_gets_the_same_beside_any_others(hidden: int, inputs: int, inner: int) -> None:
    """Also the sums of its squares, which another row count must not add in another order."""
    x, weight = tensors(32, hidden, inputs, torch.device("cuda"))
    _, gate_up = tensors(32, 2 * inner, hidden, torch.device("cuda"))
    residual, gain = stream(32, hidden, x), norm_weight(hidden, x)

    def run(some: slice) -> tuple[torch.Tensor, ...]:
        total = residual[some].clone()
        scaled, norm = add_linear(x[some], weight, total, gain, EPSILON)
        tiles = -(-hidden // 64)
        return total, scaled, norm.squares[:, :tiles], gated_linear(scaled, gate_up, norm=norm)

    together = run(slice(0, 32))
    for rows in (1, 2, 4, 16, 17, 27):
        some = slice(5, 5 + rows)
        for alone, among in zip(run(some), together, strict=True):
            assert torch.equal(alone, among[some])


@pytest.mark.gpu
def test_the_parts_of_a_sum_are_added_in_one_order() -> None:
    x, weight = tensors(16, 4096, 4096, torch.device("cuda"))
    residual, gain = stream(16, 4096, x), norm_weight(4096, x)
    results = []
    for _ in range(200):
        total = residual.clone()
        scaled, norm = add_linear(x, weight, total, gain, EPSILON)
        results.append((total, scaled, norm.squares[:, :64].clone()))
    assert all(torch.equal(a, b) for r in results for a, b in zip(r, results[0], strict=True))
