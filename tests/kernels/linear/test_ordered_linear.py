"""Ordered products: every kernel that may compute a row of a weight gives it the same bits, and the kernels
are chosen by size."""

from __future__ import annotations

import pytest
import torch
from headway_testing.products import ACTIVATIONS, assert_near, tensors

from headway.kernels import (
    Activation,
    DenseWeight,
    Epilogue,
    GateActivation,
    adds_residual,
    library_is_ordered,
    linear,
    qkv_rope_append,
    rope_append,
)
from headway.kernels.linear import _ordered_linear as ordered
from headway.kernels.linear._ordered_linear import keep_sums_whole, ordered_linear
from headway.kernels.linear.dispatch import (
    DeviceTraits,
    FusedOperation,
    LinearChoice,
    LinearKernel,
    LinearShape,
    TmaGemmConfig,
    WeightFormat,
    choose,
)

HOPPER = DeviceTraits(132, has_tma=True)
OLDER = DeviceTraits(108, has_tma=False)
# Outputs x inputs: a 7B model's, one whose sums are long, a small one's, and one that no bulk copy takes.
SHAPES = [(4096, 4096), (4096, 11008), (3584, 18944), (1024, 2816), (896, 896)]
ROWS = (1, 4, 5, 8, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 300, 512, 640, 1024, 2048, 9000)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "config"),
    [
        (1, 4096, 4096, TmaGemmConfig(128, outputs=32, is_ordered=True)),
        (32, 4096, 11008, TmaGemmConfig(128, outputs=32, is_ordered=True)),
        (33, 4096, 11008, TmaGemmConfig(64, copy_bytes=256, is_ordered=True)),
        (4, 6144, 4096, TmaGemmConfig(96, is_ordered=True)),
        (4, 22016, 4096, TmaGemmConfig(344, is_ordered=True)),
        (4, 1024, 2816, TmaGemmConfig(16, is_ordered=True)),
        (4, 896, 896, None),
        (65, 4096, 4096, None),
    ],
)
def test_sums_are_whole_and_tiles_thin_where_these_fill_the_device(
    rows: int, outputs: int, inputs: int, config: TmaGemmConfig | None
) -> None:
    shape = LinearShape(rows, outputs, inputs, torch.bfloat16, format=WeightFormat.ORDERED)
    kernel = LinearKernel.BATCH_INVARIANT if config is None else LinearKernel.TMA
    assert choose(shape, HOPPER, FusedOperation.ADD) == LinearChoice(kernel, config)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "config"),
    [
        (1, 4096, 4096, TmaGemmConfig(64, is_ordered=True)),
        (32, 4096, 11008, TmaGemmConfig(64, is_ordered=True)),
        (33, 4096, 11008, TmaGemmConfig(64, copy_bytes=256, is_ordered=True)),
    ],
)
def test_fast_memory_is_read_in_wide_tiles(
    rows: int, outputs: int, inputs: int, config: TmaGemmConfig
) -> None:
    shape = LinearShape(rows, outputs, inputs, torch.bfloat16, format=WeightFormat.ORDERED)
    fast = HOPPER._replace(bandwidth=4.9e12)
    assert choose(shape, fast, FusedOperation.ADD) == LinearChoice(LinearKernel.TMA, config)


def test_only_a_library_that_was_tried_computes_many_rows() -> None:
    shape = LinearShape(65, 4096, 4096, torch.bfloat16, format=WeightFormat.LIBRARY_ORDERED)
    assert choose(shape, HOPPER, FusedOperation.ADD).kernel is LinearKernel.LIBRARY
    ordered = shape._replace(format=WeightFormat.ORDERED)
    assert choose(ordered, HOPPER, FusedOperation.ADD).kernel is LinearKernel.BATCH_INVARIANT
    assert choose(shape._replace(rows=4), OLDER, FusedOperation.ADD).kernel is LinearKernel.BATCH_INVARIANT


def test_gates_keep_their_kernels() -> None:
    def kernel(rows: int) -> LinearKernel:
        shape = LinearShape(rows, 22016, 4096, torch.bfloat16, format=WeightFormat.LIBRARY_ORDERED)
        return choose(shape, HOPPER, FusedOperation.GATED_MUL).kernel

    assert [kernel(rows) for rows in (4, 65, 129, 4096)] == [
        LinearKernel.TMA, LinearKernel.TMA, LinearKernel.LIBRARY, LinearKernel.PERSISTENT_GATED,
    ]  # fmt: skip


def test_the_product(device: torch.device) -> None:
    x, weight = tensors(19, 96, 256, device)
    residual, bias = torch.randn(19, 96).to(x), torch.randn(96).to(x)
    product = x.double() @ weight.double().T
    assert_near(ordered_linear(x, weight, bias), product + bias.double())
    assert_near(
        ordered_linear(x, weight, bias, residual=residual), product + bias.double() + residual.double()
    )
    out = torch.empty_like(residual)
    assert ordered_linear(x, weight, residual=residual, out=out) is out
    assert_near(out, product + residual.double())
    gate, up = product.chunk(2, dim=1)
    for activation, function in ACTIVATIONS.items():
        assert_near(ordered_linear(x, weight, gate=activation), function(gate) * up)


@pytest.fixture
def whole_sums() -> None:
    keep_sums_whole()


def stored(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, DenseWeight]:
    x, weight = tensors(max(ROWS), outputs, inputs, torch.device("cuda"), dtype)
    return x, DenseWeight(weight, is_batch_invariant=True, is_library_ordered=library_is_ordered(weight))


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES, ids=str)
def test_a_row_gets_the_same_bits_among_any_others(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = stored(outputs, inputs, dtype)
    assert weight.is_library_ordered == (inputs % 256 == 0)
    residual = torch.randn(len(x), outputs, device="cuda", dtype=dtype)
    bias = torch.randn(outputs, device="cuda", dtype=dtype)
    # The norm after the product adds what the product does not.
    assert adds_residual(x[:1], weight, has_bias=False) == (inputs % 256 == 0)
    assert not adds_residual(x, weight, has_bias=False)

    def plain(rows: slice) -> torch.Tensor:
        return linear(Activation(x[rows]), weight).values

    def biased(rows: slice) -> torch.Tensor:
        return linear(Activation(x[rows]), weight, Epilogue(bias)).values

    def added(rows: slice) -> torch.Tensor:
        return linear(Activation(x[rows]), weight, Epilogue(residual=residual[rows])).values

    for result in (plain, biased, added):
        expected = torch.cat([result(slice(row, row + 1)) for row in range(128)])
        for rows in ROWS:
            found = result(slice(0, rows))
            assert torch.equal(found[:128], expected[:rows]), f"{result.__name__}, {rows} rows"
        last = result(slice(len(x) - 1, len(x)))
        assert torch.equal(result(slice(0, len(x)))[-1:], last)


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(22016, 4096), (5632, 1024), (9728, 896)], ids=str)
def test_gates_get_the_same_bits_among_any_others(
    outputs: int, inputs: int, activation: GateActivation, *, has_bias: bool
) -> None:
    x, weight = stored(outputs, inputs, torch.bfloat16)
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if has_bias else None
    epilogue = Epilogue(bias, activation)
    expected = torch.cat([linear(Activation(x[row : row + 1]), weight, epilogue).values for row in range(64)])
    for rows in ROWS:
        found = linear(Activation(x[:rows]), weight, epilogue).values
        assert torch.equal(found[:64], expected[:rows]), f"{rows} rows"


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("has_bias", [False, True])
def test_queries_and_keys_get_the_same_bits_in_one_launch_and_in_two(*, has_bias: bool) -> None:
    q_heads, kv_heads, dim, hidden, rows = 32, 8, 128, 4096, 64
    x, weight = stored((q_heads + 2 * kv_heads) * dim, hidden, torch.bfloat16)
    bias = torch.randn(len(weight.values), device="cuda", dtype=torch.bfloat16) if has_bias else None
    positions = torch.randint(0, 512, (rows,), device="cuda")
    table = torch.randn(512, dim, device="cuda")
    slots = torch.randperm(128, device="cuda")[:rows]
    caches = [torch.zeros(8, 16, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    query = qkv_rope_append(
        x[:rows], weight.values, bias, None, positions, table, *caches[:2], slots, is_ordered=True
    )
    product = linear(Activation(x), weight, Epilogue(bias)).values[:rows].clone()
    heads = product.view(rows, -1, dim).split_with_sizes((q_heads, kv_heads, kv_heads), dim=1)
    rope_append(*heads, positions, table, *caches[2:], slots)
    assert torch.equal(query, heads[0])
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


def test_more_rows_than_were_tried_are_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(ordered, "linear", noted)
    monkeypatch.setattr(ordered, "choice_of", lambda *_: LinearChoice(LinearKernel.LIBRARY))
    monkeypatch.setattr(ordered, "_MOST_TRIED", 96 * 112)
    x, weight = tensors(300, 96, 64, torch.device("cpu"))
    bias = torch.randn(96)
    assert_near(ordered_linear(x, weight, bias), x.double() @ weight.double().T + bias.double())
    assert asked == [112, 112, 76]


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_library_that_splits_sums_is_found_out(monkeypatch: pytest.MonkeyPatch, *, has_bias: bool) -> None:
    _, weight = tensors(1, 4096, 4096, torch.device("cuda"), torch.bfloat16)
    bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16) if has_bias else None
    assert library_is_ordered(weight, bias)

    def split(x: torch.Tensor, other: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
        half = x.shape[1] // 2
        first = torch.mm(x[:, :half], other[:, :half].t(), out_dtype=torch.float32)
        whole = torch.addmm(first, x[:, half:], other[:, half:].t(), out_dtype=torch.float32)
        return (whole if shift is None else whole + shift).to(x.dtype)

    monkeypatch.setattr(ordered, "linear", split)
    assert not library_is_ordered(weight, bias)
