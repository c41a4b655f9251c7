"""prepare_verify_inputs against a row-by-row statement of what it promises."""

import pytest
import torch
from headway_testing.round_rows import copied, listed, random_rows

from headway.kernels import RoundWindow, prepare_verify_inputs

RUBBISH = -77


def advanced(state: dict[str, object], depth: int, block_size: int) -> dict[str, object]:
    """Returns what becomes of one row: a window takes the granted blocks that it reaches."""
    length = state["kv_lengths"]
    if length >= state["limits"]:
        return state | {"prefill_status": 1}
    new_length = length + depth + 1
    count, new_count = state["block_counts"], -(-new_length // block_size)
    table, granted = list(state["kv_block_ids"]), [*state["granted_block_ids"], -1]
    for taken in range(count, min(new_count, len(table))):
        table[taken] = granted[taken]
    return state | {
        "prefill_status": 0,
        "kv_lengths": new_length,
        "last_block_offsets": (new_length - 1) % block_size,
        "block_counts": new_count,
        "last_block_ids": granted[count] if new_count > count else state["last_block_ids"],
        "kv_block_ids": table,
    }


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 40, 70])
@pytest.mark.parametrize(("depth", "block_size"), [(0, 1), (0, 16), (1, 2), (3, 4), (3, 16), (7, 16)])
def test_every_row_opens_its_window_and_advances(
    num_rows: int, depth: int, block_size: int, device: torch.device
) -> None:
    rows = random_rows(num_rows, block_size, depth, num_rows + depth, device)
    drafts = torch.randint(0, 9, (num_rows, depth), device=device)
    before = listed(rows)
    window = prepare_verify_inputs(rows, drafts, block_size)
    assert listed(rows) == [advanced(state, depth, block_size) for state in before]
    for row, state in enumerate(before):
        length, limit = state["kv_lengths"], state["limits"]
        room = min(limit - length, state["depth_caps"] + 1)
        tokens = [state["last_tokens"], *drafts[row].tolist()]
        for place, token in enumerate(tokens):
            position, is_valid = length + place, place < room
            block = state["granted_block_ids"][position // block_size] if is_valid else 0
            slot = block * block_size + position % block_size
            found = (
                bool(window.is_valid[row, place]),
                int(window.token_ids[row, place]),
                int(window.positions[row, place]),
                int(window.slot_mapping[row, place]),
            )
            assert found == ((True, token, position, slot) if is_valid else (False, 0, 0, -1))
        ends = (length, length + min(room, len(tokens))) if length < limit else (0, 0)
        assert (int(window.start_positions[row]), int(window.end_positions[row])) == ends
        assert int(window.next_positions[row]) == ends[0] + 1


def test_given_buffers_are_filled_and_returned(device: torch.device) -> None:
    rows = random_rows(5, 16, 3, 1, device)
    drafts = torch.arange(40, device=device).view(5, 8)[:, ::2][:, :3]
    again = copied(rows)
    out = RoundWindow.empty(5, 3, device)
    for name in set(RoundWindow.__slots__) - {"is_valid"}:
        getattr(out, name).fill_(RUBBISH)
    assert prepare_verify_inputs(rows, drafts, 16, out=out) is out
    fresh = prepare_verify_inputs(again, drafts, 16)
    for name in RoundWindow.__slots__:
        assert torch.equal(getattr(out, name), getattr(fresh, name)), name


def test_rows_of_a_wider_table(device: torch.device) -> None:
    """The first rows and columns of larger tables, as a slot table gives them; the rest stays."""
    rows = random_rows(9, 4, 3, 2, device)
    drafts = torch.ones((9, 3), dtype=torch.int64, device=device)
    expected = copied(rows)
    prepare_verify_inputs(expected, drafts, 4)
    backing = torch.full((2, 9, 11), RUBBISH, device=device)
    backing[0, :, :6], backing[1, :, :6] = rows.kv_block_ids, rows.granted_block_ids
    wide = type(rows)(
        *(getattr(rows, name) for name in rows.__slots__[:7]),
        backing[0, :, :6],
        backing[1, :, :6],
        *(getattr(rows, name) for name in rows.__slots__[9:]),
    )
    prepare_verify_inputs(wide, drafts, 4)
    assert listed(wide) == listed(expected)
    assert bool((backing[:, :, 6:] == RUBBISH).all())


def test_a_window_over_two_boundaries_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="4 speculative tokens would cross more than one boundary"):
        prepare_verify_inputs(
            random_rows(1, 4, 3, 0, device), torch.zeros((1, 4), dtype=torch.int64, device=device), 4
        )
