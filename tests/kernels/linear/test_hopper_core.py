"""Products whose weights flow by bulk copies: which take it, and on Hopper that their results are right and a
row's own."""

import itertools
from collections.abc import Callable

import pytest
import torch
from headway_testing.products import (
    ACTIVATIONS,
    Place,
    assert_each_launch_waits,
    assert_each_near,
    assert_near,
    beside_rubbish,
    tensors,
)

from headway.kernels import GateActivation, rms_norm
from headway.kernels.linear import _hopper_core as _streamed
from headway.kernels.linear._hopper_core import (
    choice_of,
    is_copied,
    shape_of,
    stream_constants_of,
    traits_of,
)
from headway.kernels.linear.dispatch import FusedOperation, LinearKernel, TmaGemmConfig, tma_config_of_many
from headway.kernels.linear.gated_linear import gated_linear
from headway.kernels.linear.skinny_linear import skinny_linear

CPU = torch.device("cpu")
# Outputs x inputs: sums whole, in two and four parts, odd ends, more programs than run at once, in two waves
# and in many.
SHAPES = {
    "whole": (6144, 4096),
    "split": (4096, 4096),
    "long": (4096, 11008),
    "quarters": (2048, 11008),
    "odd": (6004, 2048),
    "odd split": (4040, 4096),
    "many": (40000, 2048),
    "wide": (22000, 2048),
    "waves": (104_000, 2048),
}
ROWS = {
    "one": 1,
    "window": 4,
    "odd": 5,
    "tile": 8,
    "beyond a tile": 9,
    "two tiles": 16,
    "more": 17,
    "half": 33,
    "three": 48,
    "most": 64,
}
HIDDEN = 4096


def config_of(x: torch.Tensor, weight: torch.Tensor) -> TmaGemmConfig | None:
    return choice_of(x, weight, FusedOperation.ADD).config


def paired_config_of(x: torch.Tensor, weight: torch.Tensor) -> TmaGemmConfig | None:
    return choice_of(x, weight, FusedOperation.QKV).config


def many_config_of(x: torch.Tensor, weight: torch.Tensor) -> TmaGemmConfig | None:
    return tma_config_of_many(shape_of(x, weight), traits_of(x))


@pytest.fixture
def pretended_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streamed, "has_bulk_copies", lambda x: True)
    monkeypatch.setattr(_streamed, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [
        (1, 6144, 4096, TmaGemmConfig(96, 1)),
        (32, 6144, 4096, TmaGemmConfig(96, 1)),
        (33, 6144, 4096, TmaGemmConfig(96, 1, copy_bytes=256)),
        (64, 4096, 4096, TmaGemmConfig(128, 2, 12, copy_bytes=256)),
        (64, 4096, 11008, TmaGemmConfig(128, 2, 38, copy_bytes=256)),
        (4, 22016, 4096, TmaGemmConfig(344)),
        (32, 22016, 4096, TmaGemmConfig(344)),
        (33, 22016, 4096, TmaGemmConfig(344)),
        (64, 25345, 4096, TmaGemmConfig(397)),
        (4, 4096, 11008, TmaGemmConfig(128, 2, 19)),
        (4, 2048, 11008, TmaGemmConfig(128, 4, 10)),
        (4, 1000, 11008, None),
        (4, 151_680, 4096, TmaGemmConfig(2370)),
        (64, 151_680, 4096, TmaGemmConfig(2370)),
        (4, 5120, 5120, None),
        (4, 4096, 2048, None),
        (65, 6144, 4096, None),
        (0, 6144, 4096, None),
        (4, 6144, 4224, None),
        (4, 151_680, 1024, None),
    ],
    ids=str,
)
def test_the_weight_decides_how_sums_are_cut_and_rows_how_large_copies_are(
    rows: int, outputs: int, inputs: int, expected: TmaGemmConfig | None
) -> None:
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, outputs))
    assert config_of(x, weight) == expected


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [
        (4, 6144, 4096, TmaGemmConfig(96)),
        (32, 4096, 8192, TmaGemmConfig(128, 2, 6)),
        (33, 6144, 4096, TmaGemmConfig(96, copy_bytes=256)),
        (64, 4096, 8192, TmaGemmConfig(128, 2, 12, copy_bytes=256)),
        (64, 22016, 4096, TmaGemmConfig(344)),
        (4, 4096, 4096, None),
        (4, 6144, 2048, None),
    ],
    ids=str,
)
def test_a_copy_has_as_many_bytes_of_float8(
    rows: int, outputs: int, inputs: int, expected: TmaGemmConfig | None
) -> None:
    x, weight = (torch.empty(n, inputs, dtype=torch.float8_e4m3fn, device="meta") for n in (rows, outputs))
    assert config_of(x, weight) == expected
    assert paired_config_of(x, weight) is None


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [
        (64, 22016, 4096, None),
        (65, 22016, 4096, TmaGemmConfig(115, tiles=3, copy_bytes=256)),
        (128, 16384, 4096, TmaGemmConfig(128, tiles=2, copy_bytes=256)),
        (129, 22016, 4096, None),
        (128, 6144, 4096, None),
        (128, 12288, 4096, None),
        (128, 28672, 4096, None),
        (128, 22016, 1024, None),
    ],
    ids=str,
)
def test_more_rows_share_a_program_s_tiles(
    rows: int, outputs: int, inputs: int, expected: TmaGemmConfig | None
) -> None:
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, outputs))
    assert many_config_of(x, weight) == expected


def test_what_cannot_be_copied_so_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors(4, 6144, 2048, CPU, torch.bfloat16)
    wide = torch.zeros(4, 4096, dtype=torch.bfloat16)
    assert config_of(x, weight) is None
    monkeypatch.setattr(_streamed, "has_bulk_copies", lambda x: True)
    monkeypatch.setattr(_streamed, "multiprocessors", lambda device: 132)
    assert config_of(x, weight) is not None
    assert config_of(wide[:, 8:2056], weight) is not None
    assert config_of(wide[:, 1:2049], weight) is None
    assert config_of(wide[:, ::2], weight) is None
    assert config_of(x.float(), weight.float()) is None
    assert config_of(x.half(), weight) is None
    assert config_of(x, weight.T.contiguous().T) is None
    assert config_of(wide[0, :2048], weight) is None
    assert paired_config_of(x, weight) is not None
    assert paired_config_of(x, weight[:6136]) is None
    eight_bits = wide.to(torch.float8_e4m3fn)
    assert is_copied(wide[:, 8:])
    assert not is_copied(eight_bits[:, 8:])
    assert is_copied(eight_bits[:, 16:])
    assert not is_copied(eight_bits.view(-1)[: 4 * 4088].view(4, 4088))


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        (6144, 4096), (4096, 8192), (4096, 11264), (2048, 16384),
        *(pytest.param(*shape, marks=pytest.mark.long) for shape in ((4096, 11776), (22016, 4096))),
    ],
)  # fmt: skip
def test_no_number_of_rows_changes_the_order_of_sums(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """A tile's first input, and its part's, are the same with copies of either size, beside any tiles."""
    orders, sizes = [], set()
    for rows in (1, 32, 33, 64):
        x, weight = (torch.empty(n, inputs, dtype=dtype, device="meta") for n in (rows, outputs))
        streams = config_of(x, weight)
        assert streams is not None
        constants = stream_constants_of(x, streams)
        copy, copies = constants["INPUTS"], inputs // constants["INPUTS"]
        firsts = {}
        for program in range(streams.programs):
            tile, part = program // streams.split, program % streams.split
            begin = part * streams.part_copies
            end = copies if part == streams.split - 1 else begin + streams.part_copies
            turn = tile % constants["STARTS"]
            unit = constants["UNIT"]
            own = begin + turn * ((end - begin) // unit) // constants["STARTS"] * unit
            assert begin <= own < end
            firsts[tile, part] = begin * copy, own * copy, end * copy
        orders.append(firsts)
        sizes.add(copy)
    assert all(order == orders[0] for order in orders)
    assert len(sizes) == (2 if streams.programs <= 132 else 1)


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize("rows", [1, 64])
def test_the_last_part_of_a_sum_has_more_than_the_others(rows: int) -> None:
    """And all parts run at once: the last waits for the others."""
    splits = set()
    for outputs, inputs in itertools.product(range(64, 6145, 64), range(4096, 65537, 1280)):
        x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, outputs))
        streams = config_of(x, weight)
        if streams is None or streams.split == 1:
            continue
        splits.add(streams.split)
        unit, copies = 512 // streams.copy_bytes, inputs * 2 // streams.copy_bytes
        more = copies - streams.split * streams.part_copies
        assert streams.part_copies % unit == 0
        assert 3 <= more // unit <= 6
        assert streams.programs <= 132
    assert splits == {2, 4}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_the_product(outputs: int, inputs: int, rows: int, dtype: torch.dtype, hopper: torch.device) -> None:
    """Of rows of a wider tensor, beside which rubbish stands, into a part of another."""
    x, weight = tensors(rows, outputs, inputs, hopper, dtype)
    assert config_of(x, weight) is not None
    place = Place(rows, outputs, x)
    out = place.out
    assert skinny_linear(beside_rubbish(x), weight, out=out) is out
    product = x.double() @ weight.double().T
    assert_near(out, product)
    place.assert_around_it_nothing_is_written()
    bias, residual = torch.randn(outputs).to(x), torch.randn(rows, outputs).to(x)
    expected = product + bias.double() + residual.double()
    assert_near(skinny_linear(x, weight, bias, residual=residual, out=out), expected)
    out.copy_(residual)
    assert skinny_linear(x, weight, bias, residual=out, out=out) is out
    assert_near(out, expected)
    place.assert_around_it_nothing_is_written()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4040, 4096), (22000, 2048)], ids=str)
def test_all_is_added_before_it_is_rounded(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, hopper: torch.device
) -> None:
    """Sums of small integers are exact."""
    generator = torch.Generator(hopper).manual_seed(rows)
    x, weight, bias, residual = (
        torch.randint(-2, 3, shape, generator=generator, device=hopper).to(dtype)
        for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    )
    bias, residual = bias / 16, residual / 64
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    assert torch.equal(skinny_linear(x, weight, bias, residual=residual), expected.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(11008, 4096), (3016, 2048), (20000, 2048)], ids=str)
def test_the_gated_product(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, activation: GateActivation, hopper: torch.device
) -> None:
    x, weight = tensors(rows, 2 * outputs, inputs, hopper, dtype)
    assert paired_config_of(x, weight) is not None
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    place = Place(rows, outputs, x)
    out = place.out
    assert gated_linear(x, weight, activation=activation, out=out) is out
    assert_near(out, ACTIVATIONS[activation](gate) * up)
    place.assert_around_it_nothing_is_written()


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [65, 96, 127, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(11008, 4096), (8192, 2048), (11000, 2048)], ids=str)
def test_the_gated_product_of_more_rows(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, activation: GateActivation, hopper: torch.device
) -> None:
    """Of rows of a wider tensor, beside which rubbish stands, into a part of another."""
    x, weight = tensors(rows, 2 * outputs, inputs, hopper, dtype)
    assert many_config_of(x, weight) is not None
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    place = Place(rows, outputs, x)
    out = place.out
    assert gated_linear(beside_rubbish(x), weight, activation=activation, out=out) is out
    assert_each_near(out, ACTIVATIONS[activation](gate) * up)
    assert all(torch.equal(gated_linear(x, weight, activation=activation), out) for _ in range(50))
    place.assert_around_it_nothing_is_written()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 9, 33, 64, 65, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(11008, 4096), (11000, 2048)], ids=str)
def test_a_bias_is_added_before_the_activation(
    outputs: int, inputs: int, rows: int, dtype: torch.dtype, hopper: torch.device
) -> None:
    x, weight = tensors(rows, 2 * outputs, inputs, hopper, dtype)
    choice = choice_of(x, weight, FusedOperation.GATED_MUL_BIASED)
    assert choice.kernel is LinearKernel.TMA
    bias = torch.randn(2 * outputs, generator=torch.Generator().manual_seed(1)).to(x)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=1)
    place = Place(rows, outputs, x)
    out = place.out
    assert gated_linear(x, weight, bias, out=out) is out
    assert_each_near(out, torch.nn.functional.silu(gate) * up)
    place.assert_around_it_nothing_is_written()


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_a_row_gets_the_same_beside_any_others(outputs: int, inputs: int, hopper: torch.device) -> None:
    x, weight = tensors(64, outputs, inputs, hopper)
    bias, residual = torch.randn(outputs).to(x), torch.randn(64, outputs).to(x)
    plain, gated = skinny_linear(x, weight), gated_linear(x, weight)
    added = skinny_linear(x, weight, bias, residual=residual)
    for rows in (1, 2, 5, 8, 9, 15, 16, 17, 32, 33, 59):
        some = slice(5, 5 + rows)
        assert torch.equal(skinny_linear(x[some], weight), plain[some])
        assert torch.equal(skinny_linear(x[some], weight, bias, residual=residual[some]), added[some])
        if paired_config_of(x, weight) is not None:
            assert torch.equal(gated_linear(x[some], weight), gated[some])
    assert all(torch.equal(skinny_linear(x, weight), plain) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_the_last_part_gets_the_others_while_other_work_keeps_multiprocessors_from_them(
    rows: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in two and four parts, which share counters, one behind the other."""
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    cases = []
    for shape in ("split", "long", "quarters"):
        x, weight = tensors(rows, *SHAPES[shape], hopper)
        cases.append((x, weight, skinny_linear(x, weight)))
    square, beside = torch.randn(2048, 2048, device=hopper), torch.cuda.Stream(hopper)
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(beside):
            square @ square
        results = [(skinny_linear(x, weight), expected) for x, weight, expected in cases * 4]
        assert all(torch.equal(result, expected) for result, expected in results)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 48, 64, 100, 768])
def test_a_layer_waits_for_what_stands_in_front(
    rows: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched one over the other, with other inputs each time: nothing is read that was there before."""
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    generator = torch.Generator(hopper).manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=hopper).to(torch.bfloat16)

    weights = [
        random(n, k) / k**0.5 for n, k in ((6144, HIDDEN), (HIDDEN, HIDDEN), (22016, HIDDEN), (HIDDEN, 11008))
    ]
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=hopper)

    def compute(x: torch.Tensor, waits: bool) -> torch.Tensor:
        between: Callable[[], object] = torch.cuda.synchronize if waits else lambda: None
        residual = x.clone()
        for _ in range(3):
            normed = rms_norm(residual, norm, 1e-5)
            between()
            attended = skinny_linear(normed, weights[0])[:, :HIDDEN]
            between()
            skinny_linear(attended, weights[1], residual=residual, out=residual)
            between()
            normed = rms_norm(residual, norm, 1e-5)
            between()
            gated = gated_linear(normed, weights[2])
            between()
            residual = skinny_linear(gated, weights[3], residual=residual)
            between()
            # To what the launch in front has just written.
            skinny_linear(gated, weights[3], residual=residual, out=residual)
            between()
        return residual

    assert_each_launch_waits(compute, random(rows, HIDDEN), generator)
