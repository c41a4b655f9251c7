"""advance, and that advance with rewind is the same as advancing by what stays."""

import itertools

import pytest
import torch

from headway.kernels import advance, rewind_kv_cache

RUBBISH = -123_456
MAX_BLOCKS = 6
State = dict[str, torch.Tensor]
DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])


def state_of(
    lengths: list[int], block_size: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> State:
    """Rows with `lengths` tokens in the cache; block i of row r is 100 * r + i + 1, all granted."""
    length = torch.tensor(lengths, dtype=dtype)
    granted = torch.arange(len(lengths))[:, None] * 100 + torch.arange(1, MAX_BLOCKS + 1)
    counts = -(-length // block_size)
    table = torch.where(torch.arange(MAX_BLOCKS) < counts[:, None], granted, -1)
    last = table.gather(1, (counts.long() - 1).clamp(0)[:, None])[:, 0]
    state = {
        "kv_length_offsets": length,
        "last_kv_block_offset": (length - 1) % block_size,
        "kv_block_counts": counts,
        "last_kv_block_id": last,
        "kv_block_ids": table,
        "granted_block_ids": granted,
        "prefill_status": torch.full_like(length, 7),
    }
    return {name: value.to(device, dtype) for name, value in state.items()}


def run(
    state: State,
    limits: list[int],
    depth: int,
    block_size: int,
    active: int | torch.Tensor | None = None,
) -> None:
    limit = torch.tensor(limits, device=state["kv_length_offsets"].device)
    vectors = (
        state["kv_length_offsets"],
        state["last_kv_block_offset"],
        state["kv_block_counts"],
        state["last_kv_block_id"],
    )
    tables = state["kv_block_ids"], state["granted_block_ids"]
    advance(*vectors, *tables, limit, state["prefill_status"], depth, block_size, active)


def rewind(state: State, accepted: list[int], depth: int, block_size: int) -> None:
    counts = torch.tensor(accepted, device=state["kv_length_offsets"].device)
    rewind_kv_cache(
        counts,
        state["prefill_status"],
        state["last_kv_block_offset"],
        state["kv_length_offsets"],
        state["kv_block_counts"],
        state["last_kv_block_id"],
        state["kv_block_ids"],
        depth,
        block_size,
    )


def assert_equal(state: State, expected: State) -> None:
    for name, value in expected.items():
        assert state[name].tolist() == value.tolist(), name


@DTYPES
@pytest.mark.parametrize("depth", range(4))
def test_every_length_counts_the_whole_window(depth: int, dtype: torch.dtype, device: torch.device) -> None:
    lengths = list(range(1, 17))
    state = state_of(lengths, 4, device, dtype)
    run(state, [100] * 16, depth, 4)
    expected = state_of([length + depth + 1 for length in lengths], 4, device, dtype)
    expected["prefill_status"].zero_()
    assert_equal(state, expected)


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_advance_then_rewind_is_advance_by_what_stays(block_size: int, device: torch.device) -> None:
    for depth in range(block_size):
        cases = list(itertools.product(range(block_size, 2 * block_size + 1), range(depth + 1)))
        lengths, accepted = [c[0] for c in cases], [c[1] for c in cases]
        state = state_of(lengths, block_size, device)
        run(state, [10_000] * len(cases), depth, block_size)
        rewind(state, accepted, depth, block_size)
        stays = [length + kept + 1 for length, kept in cases]
        expected = state_of(stays, block_size, device)
        expected["prefill_status"].zero_()
        assert_equal(state, expected)


def test_rows_at_their_limit_become_padding_and_stay(device: torch.device) -> None:
    lengths, limits = [5, 6, 7, 0], [5, 7, 3, 0]
    state, expected = state_of(lengths, 4, device), state_of([5, 10, 7, 0], 4, device)
    run(state, limits, 3, 4)
    expected["prefill_status"] = torch.tensor([1, 0, 1, 1])
    assert_equal(state, expected)
    rewind(state, [0, 3, 0, 0], 3, 4)
    assert_equal(state, expected)


def test_entries_never_granted_are_minus_one_and_are_taken_back(device: torch.device) -> None:
    state = state_of([8], 4, device)
    state["granted_block_ids"][:, 2:] = -1
    run(state, [9], 3, 4)
    assert state["kv_block_ids"].tolist() == [[1, 2, -1, -1, -1, -1]]
    assert state["last_kv_block_id"].tolist() == [-1]
    assert state["kv_block_counts"].tolist() == [3]
    rewind(state, [0], 3, 4)
    assert state["kv_length_offsets"].tolist() == [9]


def test_a_window_past_the_table_touches_nothing_outside(device: torch.device) -> None:
    backing = torch.full((3, MAX_BLOCKS + 2), 77, device=device)
    state = state_of([MAX_BLOCKS * 4 - 1], 4, device)
    before = {name: value.clone() for name, value in state.items()}
    backing[1:2, :MAX_BLOCKS] = state["kv_block_ids"]
    state["kv_block_ids"] = backing[1:2, :MAX_BLOCKS]
    run(state, [MAX_BLOCKS * 4], 3, 4)
    assert state["kv_block_counts"].tolist() == [MAX_BLOCKS + 1]
    rewind(state, [0], 3, 4)
    before["kv_length_offsets"] += 1
    before["last_kv_block_offset"] += 1
    before["prefill_status"].zero_()
    assert_equal(state, before)
    outside = torch.cat((backing[0], backing[2], backing[1, MAX_BLOCKS:]))
    assert bool((outside == 77).all())


@DTYPES
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_rubbish_beyond_the_active_rows_is_neither_changed_nor_of_effect(
    dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    state = state_of([4, 9, 1, 1], 4, device, dtype)
    for value in state.values():
        value[2:] = RUBBISH
    expected = state_of([8, 13, 1, 1], 4, device, dtype)
    expected["prefill_status"].zero_()
    for value in expected.values():
        value[2:] = RUBBISH
    active = torch.tensor([2], device=device) if kind == "tensor" else 2
    run(state, [99, 99, 99, 99], 3, 4, active)
    assert_equal(state, expected)


def test_no_rows(device: torch.device) -> None:
    state = state_of([], 4, device)
    run(state, [], 3, 4)
    assert state["kv_length_offsets"].numel() == 0


def test_a_window_over_two_boundaries_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="16 speculative tokens would cross more than one boundary"):
        run(state_of([3], 16, device), [9], 16, 16)
