"""mamba_state_selective_copy moves the right state of every decode row and nothing else."""

import pytest
import torch

from headway.kernels import mamba_state_selective_copy

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32]


def check(
    prefill: list[int],
    slots: list[int],
    accepted: list[int],
    state_shape: tuple[int, ...],
    device: torch.device,
    *,
    layers: int = 3,
    copied_layers: int = 3,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
) -> None:
    size, depth = max([*slots, 0]) + 2, 3
    shape = (layers, size, depth + 1, *state_shape)
    intermediate = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1))
    intermediate = intermediate.to(device, dtype)
    current = torch.full((layers, size, *state_shape), 101, device=device).to(dtype)
    expected = current.clone()
    for status, slot, place in zip(prefill, slots, accepted, strict=True):
        if status == 0:
            expected[:copied_layers, slot] = intermediate[:copied_layers, slot, place]
    before = intermediate.clone()
    indices = [torch.tensor(v, device=device, dtype=index_dtype) for v in (prefill, slots, accepted)]
    mamba_state_selective_copy(intermediate, current, *indices, copied_layers)
    assert torch.equal(current, expected)
    assert torch.equal(intermediate, before)


@pytest.mark.parametrize("state_shape", [(), (1,), (5,), (3, 7), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_prefill_among_decode(
    state_shape: tuple[int, ...], index_dtype: torch.dtype, device: torch.device
) -> None:
    check([0, 1, 0, 0], [4, 0, 1, 2], [3, 2, 0, 1], state_shape, device, index_dtype=index_dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype: torch.dtype, device: torch.device) -> None:
    check([0, 0], [1, 0], [0, 3], (4, 6), device, dtype=dtype)


def test_no_rows(device: torch.device) -> None:
    check([], [], [], (3,), device)


def test_prefill_rows_may_hold_rubbish(device: torch.device) -> None:
    current = torch.zeros(1, 2, 3, device=device)
    intermediate = torch.ones(1, 2, 4, 3, device=device)
    rubbish = torch.tensor([99_999, 1], device=device)
    mamba_state_selective_copy(
        intermediate, current, torch.tensor([1, 0], device=device), rubbish, rubbish, 1
    )
    assert current.tolist() == [[[0.0] * 3, [1.0] * 3]]


def test_layers_beyond_the_count_stay(device: torch.device) -> None:
    check([0], [0], [2], (4,), device, copied_layers=2)
