"""Gated products of many rows: which take it, and on Hopper that their results are right."""

import pytest
import torch
from headway_testing.products import ACTIVATIONS, Place, assert_each_near, beside_rubbish, tensors

from headway.kernels import GateActivation
from headway.kernels.linear import _hopper_core
from headway.kernels.linear._hopper_core import choice_of
from headway.kernels.linear.dispatch import DeviceTraits, FusedOperation, LinearKernel, most_gated_rows
from headway.kernels.linear.gated_linear import gated_linear


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "is_taken"),
    [
        (639, 9728, 2560, False),
        (640, 9728, 2560, True),  # 380 tiles, 132 at once
        (640, 11008, 4096, False),  # 430 tiles: 34 in the last wave
        (768, 11008, 4096, True),
        (8192, 11008, 4096, True),
        (1152, 4096, 4096, False),  # 288 tiles: 24 in the last wave
        (8192, 3072, 1024, True),
        (8192, 3072, 960, False),
        (8192, 11004, 4096, False),
        (8192, 11008, 4100, False),
    ],
    ids=str,
)
def test_many_rows_of_whole_waves_are_for_it(
    rows: int, outputs: int, inputs: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_hopper(monkeypatch)
    x = torch.empty(rows, inputs, dtype=torch.bfloat16)
    weight = torch.empty(2 * outputs, inputs, dtype=torch.bfloat16)
    assert is_persistent(x, weight, None) is is_taken


@pytest.mark.parametrize(
    ("most", "inputs", "expected"),
    [(8192, 4096, 8192), (1024, 4096, 768), (767, 4096, 767), (640, 4096, 0), (8192, 100, 0)],
    ids=str,
)
def test_a_start_finds_rows_to_warm_it_up_with(most: int, inputs: int, expected: int) -> None:
    hopper, other = (DeviceTraits(132, has_tma=has_tma) for has_tma in (True, False))
    assert most_gated_rows(most, 22016, inputs, torch.bfloat16, hopper) == expected
    assert most_gated_rows(most, 22016, inputs, torch.float32, hopper) == 0
    assert most_gated_rows(most, 22016, inputs, torch.bfloat16, other) == 0


def test_what_cannot_be_copied_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = tensors(768, 22016, 2048, torch.device("cpu"), torch.bfloat16)
    wide = torch.zeros(768, 4096, dtype=torch.bfloat16)
    out = torch.zeros(768, 11016, dtype=torch.bfloat16)
    assert not is_persistent(x, weight, None)
    pretend_hopper(monkeypatch)
    assert is_persistent(x, weight, None)
    assert is_persistent(wide[:, 8:2056], weight, out[:, 8:])
    assert not is_persistent(wide[:, 1:2049], weight, None)
    assert not is_persistent(wide[:, ::2], weight, None)
    assert not is_persistent(x, weight, out[:, 1:11009])
    assert not is_persistent(x, weight, out.float())
    assert not is_persistent(x, weight.T.contiguous().T, None)
    assert not is_persistent(x.half(), weight, None)


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper_core, "has_bulk_copies", lambda x: True)
    monkeypatch.setattr(_hopper_core, "multiprocessors", lambda device: 132)


def is_persistent(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> bool:
    return choice_of(x, weight, FusedOperation.GATED_MUL, out).kernel is LinearKernel.PERSISTENT_GATED


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (640, 9728, 2560),
        (768, 11008, 4096),
        (1100, 11000, 1088),
        (3000, 4104, 2048),
        (2048, 4096, 1024),
        (8192, 11008, 4096),
    ],
    ids=str,
)
def test_the_gated_product(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, activation: GateActivation, hopper: torch.device
) -> None:
    """Of rows of a wider tensor, beside which rubbish stands, into a part of another; odd ends; two to 42
    tiles a program."""
    x, weight = tensors(rows, 2 * outputs, inputs, hopper, dtype)
    place = Place(rows, outputs, x)
    out = place.out
    assert is_persistent(beside_rubbish(x), weight, out)
    assert gated_linear(beside_rubbish(x), weight, activation=activation, out=out) is out
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert_each_near(out, ACTIVATIONS[activation](gate) * up)
    assert all(torch.equal(gated_linear(x, weight, activation=activation), out) for _ in range(50))
    place.assert_around_it_nothing_is_written()


@pytest.mark.gpu
def test_great_gates_neither_overflow_nor_vanish(hopper: torch.device) -> None:
    x, weight = tensors(768, 22016, 2048, hopper)
    assert is_persistent(x, weight, None)
    x *= 300
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    result = gated_linear(x, weight)
    assert bool(result.isfinite().all())
    assert_each_near(result, torch.nn.functional.silu(gate) * up)
