"""open_drafts against a row-by-row statement of what it promises."""

import pytest
import torch
from headway_testing.round_rows import listed, random_rows

from headway.kernels import DraftWindow, open_drafts

RUBBISH = -77
NAMES = DraftWindow.__slots__


@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 40, 70])
@pytest.mark.parametrize(("width", "block_size"), [(1, 1), (2, 2), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_pending_tokens_end_at_their_place(
    num_rows: int, width: int, block_size: int, ahead: int, device: torch.device
) -> None:
    rows = random_rows(num_rows, block_size, width - 1, num_rows + width, device)
    before = listed(rows)
    window = open_drafts(rows, rows.pending_tokens[:, :width], rows.pending_counts, ahead, block_size)
    assert listed(rows) == before
    for row, state in enumerate(before):
        length, limit = state["kv_lengths"], state["limits"]
        is_live = length < limit
        count = state["pending_counts"] if is_live else 0
        start = max(length + ahead - count + 1, 0) if is_live else 0
        for place in range(width):
            position = start + place
            cell = (0, 0, -1)
            if place < count and position < limit:
                block = state["granted_block_ids"][position // block_size]
                slot = block * block_size + position % block_size
                cell = (state["pending_tokens"][place], position, slot)
            found = tuple(int(getattr(window, name)[row, place]) for name in NAMES[:3])
            assert found == cell, (row, place)
        end = min(length + ahead + 1, limit) if is_live else 0
        ends = (start, end, row * width + max(count - 1, 0), length + ahead + 1 if is_live else 1)
        assert tuple(int(getattr(window, name)[row]) for name in NAMES[3:]) == ends


def test_one_draft_a_row_needs_no_counts(device: torch.device) -> None:
    """A column of a wider table."""
    rows = random_rows(9, 4, 3, 2, device)
    tokens = torch.arange(27, device=device).view(9, 3)[:, 1:2]
    window = open_drafts(rows, tokens, None, 1, 4)
    counted = open_drafts(rows, tokens, torch.ones(9, dtype=torch.int64, device=device), 1, 4)
    for name in NAMES:
        assert torch.equal(getattr(window, name), getattr(counted, name)), name


def test_given_buffers_are_filled_and_returned(device: torch.device) -> None:
    rows = random_rows(5, 16, 3, 1, device)
    out = DraftWindow.empty(5, 4, device)
    for name in NAMES:
        getattr(out, name).fill_(RUBBISH)
    arguments = rows, rows.pending_tokens[:, :4], rows.pending_counts, 0, 16
    assert open_drafts(*arguments, out=out) is out
    fresh = open_drafts(*arguments)
    for name in NAMES:
        assert torch.equal(getattr(out, name), getattr(fresh, name)), name
