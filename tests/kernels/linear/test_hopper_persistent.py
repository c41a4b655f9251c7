"""Products of short sums with wide weights: which take it, and on Hopper that their results are right and a row's own."""

import pytest
import torch
from headway_testing.products import Place, assert_each_launch_waits, assert_near, beside_rubbish, tensors

from headway.kernels import skinny_linear
from headway.kernels.linear import _hopper_core as _streamed
from headway.kernels.linear import _hopper_persistent as _resident
from headway.kernels.linear._hopper_persistent import Residents, residents_of

# Outputs x inputs: two tiles a program, one tile more than programs, many with an odd end, copies of 128 inputs, whole sums
# in one copy.
SHAPES = {
    "whole": (16_896, 1024),
    "rest": (8_464, 1024),
    "odd": (40_016, 1024),
    "small copies": (34_048, 896),
    "one copy": (34_048, 256),
}
ROWS = (1, 4, 5, 8, 9, 16, 17, 33, 48, 64)


@pytest.fixture
def pretended_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_streamed, "has_bulk_copies", lambda x: True)
    monkeypatch.setattr(_resident, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("pretended_hopper")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [
        (1, 151_680, 1024, Residents(132, 4, 512, 6)),
        (16, 151_680, 1024, Residents(132, 4, 512, 6)),
        (17, 151_680, 1024, Residents(132, 4, 512, 5)),
        (64, 151_680, 1024, Residents(132, 4, 512, 3)),
        (65, 151_680, 1024, None),
        (0, 151_680, 1024, None),
        (1, 8_464, 1024, Residents(132, 4, 512, 6)),
        (1, 8_448, 1024, None),
        (1, 8_472, 1024, None),
        (1, 151_936, 896, Residents(132, 7, 256, 12)),
        (32, 151_680, 1536, Residents(132, 6, 512, 4)),
        (33, 151_680, 1536, None),
        (1, 151_680, 2048, None),
        (16, 151_680, 1408, Residents(132, 11, 256, 10)),
        (64, 151_680, 1280, Residents(132, 10, 256, 4)),
        (33, 151_680, 1408, None),
        (1, 151_680, 1920, Residents(132, 15, 256, 12)),
        (1, 151_680, 960, None),
        (1, 151_680, 256, Residents(132, 1, 512, 6)),
        (1, 151_680, 128, None),
    ],
    ids=str,
)
def test_rows_leave_the_room_that_copies_of_a_wide_weight_take(
    rows: int, outputs: int, inputs: int, expected: Residents | None
) -> None:
    x, weight = (torch.empty(n, inputs, dtype=torch.bfloat16, device="meta") for n in (rows, outputs))
    assert residents_of(x, weight) == expected


def test_what_cannot_be_copied_so_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.empty(16_896, 256, dtype=torch.bfloat16)
    wide = torch.zeros(4, 512, dtype=torch.bfloat16)
    assert residents_of(wide[:, :256], weight) is None
    monkeypatch.setattr(_streamed, "has_bulk_copies", lambda x: True)
    monkeypatch.setattr(_resident, "multiprocessors", lambda device: 132)
    assert residents_of(wide[:, 8:264], weight) is not None
    assert residents_of(wide[:, 1:257], weight) is None
    assert residents_of(wide[:, ::2], weight) is None
    assert residents_of(wide[0, :256], weight) is None
    assert residents_of(wide[:, :256].half(), weight) is None
    assert residents_of(wide[:, :256].float(), weight.float()) is None
    assert residents_of(wide[:, :256], weight.T.contiguous().T) is None
    assert (
        residents_of(wide[:, :256], torch.empty(16_896 * 256 + 1, dtype=torch.bfloat16)[1:].view(16_896, 256))
        is None
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_the_product(outputs: int, inputs: int, rows: int, dtype: torch.dtype, hopper: torch.device) -> None:
    """Of rows of a wider tensor, beside which rubbish stands, into a part of another."""
    x, weight = tensors(rows, outputs, inputs, hopper, dtype)
    assert residents_of(x, weight) is not None
    place = Place(rows, outputs, x)
    out = place.out
    assert skinny_linear(beside_rubbish(x), weight, out=out) is out
    product = x.double() @ weight.double().T
    assert_near(out, product)
    place.assert_around_it_nothing_is_written()
    bias, residual = torch.randn(outputs).to(x), torch.randn(rows, outputs).to(x)
    added = skinny_linear(x, weight, bias, residual=residual)
    assert_near(added, product + bias.double() + residual.double())
    assert_near(skinny_linear(x, weight, residual=residual), product + residual.double())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 16, 64])
def test_rows_of_an_odd_width_are_written_as_they_lie(rows: int, hopper: torch.device) -> None:
    x, weight = tensors(rows, *SHAPES["whole"], hopper)
    around = torch.full((rows, 16_896 + 5), 7.0, dtype=x.dtype, device=hopper)
    out = around[:, 3:-2]
    assert torch.equal(skinny_linear(x, weight, out=out), skinny_linear(x, weight))
    out.fill_(7.0)
    assert bool((around == 7.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [1408, 1536, 1920])
@pytest.mark.parametrize("rows", [1, 8, 13, 32])
def test_longer_sums_of_fewer_rows(rows: int, inputs: int, hopper: torch.device) -> None:
    x, weight = tensors(rows, 34_048, inputs, hopper)
    assert residents_of(x, weight) is not None
    assert_near(skinny_linear(x, weight), x.double() @ weight.double().T)
    assert torch.equal(skinny_linear(x[:1], weight)[0], skinny_linear(x, weight)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_each_sum_is_exact_where_numbers_are_small(outputs: int, inputs: int, hopper: torch.device) -> None:
    generator = torch.Generator(hopper).manual_seed(inputs)
    x, weight = (
        torch.randint(-2, 3, shape, generator=generator, device=hopper).to(torch.float16)
        for shape in ((64, inputs), (outputs, inputs))
    )
    expected = x.float() @ weight.float().T
    for rows in ROWS:
        assert torch.equal(skinny_linear(x[:rows], weight), expected[:rows].half())


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES.values(), ids=SHAPES)
def test_a_row_gets_the_same_beside_any_others(outputs: int, inputs: int, hopper: torch.device) -> None:
    x, weight = tensors(64, outputs, inputs, hopper)
    plain = skinny_linear(x, weight)
    for rows in (1, 2, 5, 8, 9, 15, 16, 17, 32, 33, 59):
        some = slice(5, 5 + rows)
        assert torch.equal(skinny_linear(x[some], weight), plain[some])
    assert all(torch.equal(skinny_linear(x, weight), plain) for _ in range(100))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_rows_are_read_behind_the_kernel_in_front(
    rows: int, hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched one over the other, with other inputs each time, and read by another at once."""
    monkeypatch.undo()  # poison would be written between launches, and keep them apart
    generator = torch.Generator(hopper).manual_seed(rows)
    widen, narrow = (
        (torch.randn(shape, generator=generator, device=hopper) / shape[1] ** 0.5).bfloat16()
        for shape in ((16_896, 1024), (1024, 4096))
    )

    def compute(x: torch.Tensor, waits: bool) -> torch.Tensor:
        for _ in range(4):
            wide = skinny_linear(x, widen)
            if waits:
                torch.cuda.synchronize()
            x = skinny_linear(wide[:, -4096:], narrow)
            if waits:
                torch.cuda.synchronize()
        return x

    x = torch.randn(rows, 1024, generator=generator, device=hopper).bfloat16()
    assert_each_launch_waits(compute, x, generator)
