"""gated_linear against products in float64, and that a row's result is its own."""

import pytest
import torch
from headway_testing.products import ACTIVATIONS, assert_near, tensors

from headway.kernels import DeferredNorm, GateActivation
from headway.kernels.linear.gated_linear import gated_linear
from headway.kernels.types._deferred_norm import square_tiles

ROWS = {"one": 1, "window": 4, "tile": 16, "odd": 19, "most": 64, "beyond": 65}
# Outputs x inputs: many inputs, an odd end, inputs that only the smaller cut divides, inputs for the library.
SHAPES = {"long": (64, 2048), "odd": (200, 256), "narrow-cut": (70, 192), "library": (64, 100)}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_product(
    rows: int, outputs: int, inputs: int, activation: GateActivation, device: torch.device
) -> None:
    x, weight = tensors(rows, 2 * outputs, inputs, device)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    out = torch.full((rows, outputs), torch.nan).to(x)
    assert gated_linear(x, weight, activation=activation, out=out) is out
    assert_near(out, ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("rows", [1, 19, 65, 640])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_a_bias_and_a_deferred_norm(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = tensors(rows, 2 * outputs, inputs, device)
    bias = torch.randn(2 * outputs, generator=torch.Generator().manual_seed(1)).to(x)
    norm = DeferredNorm(torch.rand(rows, square_tiles(inputs)).to(device), 1e-5)
    product = x.double() @ weight.double().T
    for given, factor in ((None, 1), (norm, norm.factor(inputs).double())):
        gate, up = (product * factor + bias.double()).chunk(2, dim=1)
        assert_near(gated_linear(x, weight, bias, norm=given), torch.nn.functional.silu(gate) * up)


def test_no_rows(device: torch.device) -> None:
    x, weight = tensors(0, 128, 256, device)
    assert gated_linear(x, weight).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 32])
def test_a_gated_product_wider_than_the_device(rows: int) -> None:
    """Tiles of 128 rows of the weight, an odd end."""
    x, weight = tensors(rows, 2 * 9000, 256, torch.device("cuda"))
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert_near(gated_linear(x, weight), torch.nn.functional.silu(gate) * up)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "most"),
    [(2048, 4096, 32), (20000, 1024, 32), (2048, 1024, 32), (512, 3072, 64)],
    ids=str,
)
def test_a_row_gets_the_same_beside_any_others(outputs: int, inputs: int, most: int) -> None:
    """Sums of more than twice as many inputs as outputs up to 64 rows, others up to 32."""
    x, weight = tensors(most, 2 * outputs, inputs, torch.device("cuda"))
    together = gated_linear(x, weight)
    for rows in (1, 2, 4, 16, 17, most - 6):
        assert torch.equal(gated_linear(x[5 : 5 + rows], weight), together[5 : 5 + rows])
