"""store_pending_states against loops over rows and places."""

import pytest
import torch

from headway.kernels import store_pending_states

BLOCK_SIZE, BLOCKS, MAX_WINDOW = 4, 5, 4
# Slots of each row's window; a row of None is left alone.
ROWS: dict[str, list[list[int] | None]] = {
    "none": [],
    "one": [[3]],
    "padding": [None, None],
    "block boundary": [[2, 3, 4], [7, 8, -1]],
    "rejected": [[11, 12, 13, 14], [15, 16, 17, 18]],
    "mixed": [[0, -1], None, [19, -1], [6, 7]],
    "appended": [[3], None, [7], [8]],
}


@pytest.mark.parametrize("hidden", [64, 200])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_live_rows_and_ended_blocks_keep_states(
    rows: list[list[int] | None], hidden: int, device: torch.device
) -> None:
    window = max((len(slots) for slots in rows if slots), default=2)
    generator = torch.Generator().manual_seed(hidden + len(rows))
    states = torch.randn(len(rows), window, hidden, generator=generator).to(device)
    status = torch.tensor([int(slots is None) for slots in rows], dtype=torch.int64, device=device)
    given = [slots or [-1] * window for slots in rows]
    slots = torch.tensor(given, dtype=torch.int64, device=device).view(len(rows), window)
    ids = torch.randperm(len(rows) + 2, generator=generator)[: len(rows)].to(device)
    table = torch.randn(len(rows) + 2, MAX_WINDOW, hidden, generator=generator).to(device)
    blocks = torch.randn(BLOCKS + 1, hidden, generator=generator).to(device)
    counts = torch.arange(1, len(rows) + 1, device=device).clamp(max=MAX_WINDOW)
    counts = torch.where(status == 1, 1 << 60, counts)  # rows that are left alone may hold anything
    expected_table, expected_blocks = table.clone(), blocks.clone()
    for row, of_row in enumerate(rows):
        for place, slot in enumerate(of_row or []):
            expected_table[ids[row], place if window > 1 else counts[row] - 1] = states[row, place]
            if slot >= 0 and slot % BLOCK_SIZE == BLOCK_SIZE - 1:
                expected_blocks[slot // BLOCK_SIZE] = states[row, place]
    store_pending_states(states, status, ids, slots, counts, table, blocks, BLOCK_SIZE)
    assert torch.equal(table, expected_table)
    assert torch.equal(blocks[:-1], expected_blocks[:-1])
