"""batch_invariant_linear against products in float64, and that a row's result is its own whatever stands
beside it."""

import pytest
import torch
from headway_testing.products import assert_near, tensors

from headway.kernels.linear._batch_invariant_tiles import rows_of_each_tile, tile_of
from headway.kernels.linear.batch_invariant_linear import batch_invariant_linear

# Of each kind of tile one that is full and one that is not.
ROWS = {"one": 1, "window": 4, "tile": 16, "odd": 19, "most of few": 64, "more": 65, "many": 300}
# Outputs x inputs: an odd end, inputs that divide by 64 only, and by nothing.
SHAPES = {"whole": (64, 512), "odd": (200, 256), "narrow": (70, 192), "ragged": (64, 100)}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_the_product(rows: int, outputs: int, inputs: int, device: torch.device) -> None:
    x, weight = tensors(rows, outputs, inputs, device)
    bias = torch.randn(outputs).to(x)
    product = x.double() @ weight.double().T
    assert_near(batch_invariant_linear(x, weight), product)
    assert_near(batch_invariant_linear(x, weight, bias), product + bias.double())


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    x, weight = tensors(70, 96, 384, device)
    part = weight[:, :256].contiguous()
    assert_near(batch_invariant_linear(x[:, 64:320], part), x[:, 64:320].double() @ part.double().T)


def test_no_rows(device: torch.device) -> None:
    x, weight = tensors(0, 128, 256, device)
    assert batch_invariant_linear(x, weight).shape == (0, 128)


def test_products_are_added_from_first_to_last(is_interpreted: bool) -> None:
    """One product of each 128 inputs is not zero, so that only their order tells how the sum is rounded."""
    if not is_interpreted:
        pytest.skip("the twin's order is the library's")
    inputs = 2048
    x, weight = tensors(300, 64, inputs, torch.device("cpu"))
    x *= torch.arange(inputs) % 128 == 77
    expected = torch.zeros(300, 64)
    for i in range(77, inputs, 128):
        expected += torch.outer(x[:, i], weight[:, i])
    backwards = torch.zeros(300, 64)
    for i in reversed(range(77, inputs, 128)):
        backwards += torch.outer(x[:, i], weight[:, i])
    assert not torch.equal(backwards, expected)
    for rows in ROWS.values():
        assert torch.equal(batch_invariant_linear(x[:rows], weight), expected[:rows])


def test_tiles_that_fill_the_device() -> None:
    """On 132 multiprocessors: a 7B model's layers and an lm_head. Outputs come in 64s, whatever the rows."""
    chosen = {
        (rows, outputs): tile_of(rows, 4096, outputs, 132)[:2]
        for rows in (1, 64, 128, 256, 2048)
        for outputs in (4096, 151_680)
    }
    assert chosen == {
        (1, 4096): (64, 16), (64, 4096): (64, 64), (128, 4096): (64, 64), (256, 4096): (64, 128), (2048, 4096): (128, 256),
        (1, 151_680): (128, 16), (64, 151_680): (128, 64), (128, 151_680): (128, 128), (256, 151_680): (128, 256),
        (2048, 151_680): (128, 256),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4096, 4096), (37_888, 3584), (1408, 256), (256, 704), (300, 100)]
)
@pytest.mark.parametrize("most_rows", [1, 40, 3000])
def test_some_rows_have_every_tile(outputs: int, inputs: int, most_rows: int) -> None:
    some = rows_of_each_tile(most_rows, inputs, outputs, 132)
    tiles = [tile_of(rows, inputs, outputs, 132) for rows in some]
    assert max(some) <= most_rows
    assert len(set(tiles)) == len(tiles)
    assert set(tiles) == {tile_of(rows, inputs, outputs, 132) for rows in range(1, most_rows + 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(4096, 4096), (6144, 4096), (40000, 1024), (1024, 11008), (512, 256), (256, 704), (300, 100)],
    ids=str,
)
def test_a_row_gets_the_same_bits_beside_any_others(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Every kind of tile, the row at other places of it, and other rows with values that are not finite."""
    x, weight = tensors(2048, outputs, inputs, torch.device("cuda"), dtype)
    together = batch_invariant_linear(x, weight)
    assert_near(together, x.double() @ weight.double().T)
    for rows in (1, 2, 4, 16, 17, 64, 65, 128, 200, 256, 511, 1024):
        assert torch.equal(batch_invariant_linear(x[5 : 5 + rows], weight), together[5 : 5 + rows]), rows
    x[8:] = torch.nan
    assert torch.equal(batch_invariant_linear(x, weight)[:8], together[:8])
