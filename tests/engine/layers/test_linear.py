"""A row of a linear layer is bitwise the same among any others; packing changes speed only."""

from __future__ import annotations

import pytest
import torch

from headway.engine.layers.linear import Linear, compile_linears, finish_linears
from headway.kernels import FEW_ROWS, MIN_ADDED_ROWS, quantized_weight, rows_of_each_kernel

SIZES = [(512, 256), (1408, 256), (256, 704), (4096, 256), (256, 512), (151, 48), (101, 40), (64, 2048)]
ROUNDING = 1e-5  # of sums of 2048 products of size 1, divided by their root


def random_linear(out_size: int, in_size: int, dtype: torch.dtype = torch.float32) -> Linear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_size, in_size, dtype=dtype, generator=generator) / in_size**0.5
    return Linear(weight, torch.randn(out_size, dtype=dtype, generator=generator))


def random_rows(count: int, in_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, in_size, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("threads", [1, 2], ids=["one-thread", "two-threads"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(("out_size", "in_size"), SIZES, ids=str)
def test_a_row_is_bitwise_the_same_among_any_others(
    out_size: int, in_size: int, dtype: torch.dtype, is_packed: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    layer = random_linear(out_size, in_size, dtype)
    if is_packed:
        finish_linears([layer])
    rows = random_rows(512, in_size, dtype)
    first, last = layer(rows[:1]), layer(rows[-1:])
    counts = (
        [*range(1, 34), 60, 64, 128, 500, 512] if threads == 1 else [1, 2, 3, 4, 5, 8, 13, 16, 17, 64, 512]
    )
    assert [n for n in counts if not torch.equal(layer(rows[:n])[:1], first)] == []
    assert [n for n in counts if not torch.equal(layer(rows[-n:])[-1:], last)] == []


@pytest.mark.parametrize(("out_size", "in_size"), SIZES, ids=str)
def test_packing_changes_no_more_than_the_rounding(out_size: int, in_size: int) -> None:
    layer, rows = random_linear(out_size, in_size), random_rows(7, in_size)
    before = layer(rows)
    finish_linears([layer])
    assert (layer(rows) - before).abs().max() < ROUNDING


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "padded"])
def test_as_many_rows_return_as_came_whatever_their_stride(is_packed: bool) -> None:
    layer = Linear(torch.eye(3))
    if is_packed:
        finish_linears([layer])
    rows = torch.arange(30.0).view(5, 6)[:, ::2]
    assert torch.equal(layer(rows), rows)
    assert layer(rows[:0]).shape == (0, 3)


def test_each_kind_of_batch_invariant_layer_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [random_linear(*sizes) for sizes in ((256, 704), (256, 704), (512, 256), (64, 2048))]
    layers += [Linear(layers[0].weight)]
    for layer, is_library_ordered in zip(layers[1:], (False, False, True, False), strict=True):
        layer.order_sums({layer.kind: is_library_ordered})
    seen: list[tuple[int, tuple[int, ...]]] = []
    call = Linear.__call__

    def note(layer: Linear, x: torch.Tensor) -> torch.Tensor:
        seen.append((layers.index(layer), tuple(x.shape)))
        return call(layer, x)

    monkeypatch.setattr(Linear, "__call__", note)
    compile_linears(layers, 100)
    wanted = {i: rows_of_each_kernel(layers[i].stored, 100) for i in (1, 2, 4)}
    assert all(wanted.values())
    assert seen == [(i, (n, layers[i].weight.shape[1])) for i, rows in wanted.items() for n in rows]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "num_rows", [1, FEW_ROWS + 1, MIN_ADDED_ROWS - 1, MIN_ADDED_ROWS, MIN_ADDED_ROWS + 77]
)
def test_many_rows_are_added_to_the_residual_on_the_way(num_rows: int) -> None:
    x, weight, residual = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        for seed, shape in enumerate([(num_rows, 704), (256, 704), (num_rows, 256)])
    )
    wanted = residual.double() + x.double() @ weight.double().T
    delta = Linear(weight).added_to(residual, x)
    assert (delta is None) == (num_rows <= FEW_ROWS or num_rows >= MIN_ADDED_ROWS)
    total = residual.double() if delta is None else residual.double() + delta.double()
    assert (total - wanted).abs().max() < 2**-7 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 8, 9, 64, 65])
def test_streamed_products_are_added_to_the_residual_on_the_way(num_rows: int, dtype: torch.dtype) -> None:
    """And rounded once, where no sum is: all are of small integers. Only Hopper streams weights."""
    generator = torch.Generator("cuda").manual_seed(num_rows)
    x, weight, residual = (
        torch.randint(-2, 3, shape, generator=generator, device="cuda").to(dtype)
        for shape in ((num_rows, 4096), (4096, 4096), (num_rows, 4096))
    )
    residual /= 64
    wanted = (residual.double() + x.double() @ weight.double().T).to(dtype)
    delta = Linear(weight).added_to(residual, x)
    assert (delta is None) == (num_rows <= 64 and torch.cuda.get_device_capability()[0] == 9)
    total = residual.double() if delta is None else residual.double() + delta.double()
    bound = 0 if delta is None else 2**-7 * wanted.abs().max()
    assert (total - wanted).abs().max() <= bound


def test_few_rows_leave_the_residual_as_it_is() -> None:
    layer = Linear(torch.eye(3))
    residual, rows = torch.ones(5, 3), torch.arange(15.0).view(5, 3)
    assert torch.equal(layer.added_to(residual, rows), rows)
    assert torch.equal(residual, torch.ones(5, 3))


def test_a_weight_of_codes_shows_the_outputs_that_are_none() -> None:
    codes, rest = torch.zeros(64, 256, dtype=torch.uint8), torch.randn(12, 256).bfloat16()
    coded = quantized_weight(codes, torch.ones(64, 2), bits=8)
    assert coded is not None
    outputs = {"q": 40, "k": 24, "b": 8, "a": 4}
    layer = Linear(torch.empty(76, 256, device="meta"), torch.arange(76.0), outputs=outputs)
    assert [len(tensor) for tensor in layer.tensors().values()] == [40, 24, 8, 4, 40, 24, 8, 4]
    layer.store(coded._replace(rest=rest))
    found = layer.tensors()
    assert list(found) == ["b.weight", "a.weight", "q.bias", "k.bias", "b.bias", "a.bias"]
    assert torch.equal(torch.cat([found["b.weight"], found["a.weight"]]), rest)
    assert found["k.bias"].tolist() == list(range(40, 64))
