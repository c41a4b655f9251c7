"""skinny_linear against products in float64, and that a row's result is its own."""

import pytest
import torch
from headway_testing.products import assert_near, tensors

from headway.kernels import DeferredNorm
from headway.kernels.linear.skinny_linear import skinny_linear
from headway.kernels.types._deferred_norm import square_tiles

ROWS = {"one": 1, "window": 4, "tile": 16, "odd": 19, "most": 64, "beyond": 65}
# Outputs x inputs: split sums, an odd end, inputs that only the smaller cut divides, inputs for the library.
SHAPES = {"split": (64, 2048), "odd": (200, 256), "narrow-cut": (70, 192), "library": (64, 100)}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_the_product(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = tensors(rows, outputs, inputs, device)
    assert_near(skinny_linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_bias_and_residual_are_added(outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = tensors(3, outputs, inputs, device)
    bias, residual = torch.randn(outputs).to(x), torch.randn(3, outputs).to(x)
    product = x.double() @ weight.double().T
    assert_near(skinny_linear(x, weight, bias), product + bias.double())
    expected = product + bias.double() + residual.double()
    assert_near(skinny_linear(x, weight, bias, residual=residual), expected)
    result = skinny_linear(x, weight, bias, residual=residual, out=residual)
    assert result is residual
    assert_near(result, expected)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_a_deferred_norm_is_applied_before_the_bias(outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = tensors(3, outputs, inputs, device)
    bias, residual = torch.randn(outputs).to(x), torch.randn(3, outputs).to(x)
    squares = torch.rand(3, square_tiles(inputs)).to(device)
    norm = DeferredNorm(squares, 1e-5)
    mean = squares[:, : -(-inputs // 64)].double().sum(1, keepdim=True) / inputs
    product = x.double() @ weight.double().T * (mean + 1e-5).rsqrt()
    assert_near(skinny_linear(x, weight, norm=norm), product)
    expected = product + bias.double() + residual.double()
    assert_near(skinny_linear(x, weight, bias, norm=norm, residual=residual), expected)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    x, weight = tensors(4, 96, 384, device)
    assert_near(skinny_linear(x[:, 64:320], weight[:, :256].contiguous()), (x[:, 64:320].double() @ weight[:, :256].double().T))  # fmt: skip


def test_no_rows(device: torch.device) -> None:
    x, weight = tensors(0, 128, 256, device)
    assert skinny_linear(x, weight).shape == (0, 128)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs", "most"),
    [
        (4096, 4096, 32),
        (6144, 4096, 32),
        (40_008, 1024, 32),
        (4096, 1024, 32),
        (1024, 11008, 64),
        (1024, 3072, 64),
    ],
    ids=str,
)
def test_a_row_gets_the_same_beside_any_others(outputs: int, inputs: int, most: int) -> None:
    """Sums of more than twice as many inputs as outputs up to 64 rows, others up to 32."""
    x, weight = tensors(most, outputs, inputs, torch.device("cuda"))
    together = skinny_linear(x, weight)
    for rows in (1, 2, 4, 16, 17, most - 6):
        some = x[5 : 5 + rows]
        assert torch.equal(skinny_linear(some, weight), together[5 : 5 + rows])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(96, 256), (4096, 1024), (1024, 3072), (6144, 2048)], ids=str
)
def test_a_chain_waits_for_the_layer_in_front(
    outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches that overlap fetch their weights ahead, but never their inputs."""
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    x, weight = tensors(4, outputs, inputs, torch.device("cuda"))
    back = torch.randn(inputs, outputs, device="cuda").to(x) / outputs**0.5
    expected = x
    for _ in range(4):
        expected = skinny_linear(skinny_linear(expected, weight), back)
        torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(x)
    with torch.cuda.graph(graph):
        chained = x
        for _ in range(4):
            chained = skinny_linear(skinny_linear(chained, weight), back)
        out.copy_(chained)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_the_parts_of_a_sum_are_added_in_one_order() -> None:
    x, weight = tensors(16, 4096, 4096, torch.device("cuda"))
    first = skinny_linear(x, weight)
    assert all(torch.equal(skinny_linear(x, weight), first) for _ in range(200))
