"""The tokens that rounds without drafts leave pending for a drafter. Such a drafter processes the tokens of a
round when the next round drafts.

The pending tokens of a row are those of positions L - pending_counts + 1 .. L. They are stored from the first
column of `pending_tokens` on. A drafter catches up with all but the newest, some columns of all rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headway.engine.layers.inputs import ForwardInputs
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import QueryBatch

# The columns of all rows that one pass of catching up computes.
CAUGHT_UP_AT_ONCE = 16


def old_counts(rows: RowTensors) -> torch.Tensor:
    """Returns [rows, 1] int64: the number of pending tokens of each row before its newest; 0 or -1 for
    padding and for rows whose prompts are being computed."""
    is_live = rows.kv_lengths < rows.limits
    return torch.where(is_live, rows.pending_counts - 1, 0)[:, None]


def old_places(rows: RowTensors) -> Iterator[slice]:
    """Yields the columns of each pass."""
    for first in range(0, rows.pending_tokens.shape[1] - 1, CAUGHT_UP_AT_ONCE):
        yield slice(first, first + CAUGHT_UP_AT_ONCE)


def old_inputs(
    rows: RowTensors,
    num_old: torch.Tensor,  # [rows, 1] int64: see old_counts
    places: slice,
    block_size: int,
) -> ForwardInputs:
    """Returns the inputs of a pass over the old tokens in these columns, one window for each row. Columns
    without an old token write nothing."""
    tokens = rows.pending_tokens[:, places]
    width = tokens.shape[1]
    place = torch.arange(places.start, places.start + width, device=tokens.device)
    positions = rows.kv_lengths[:, None] - num_old + place
    is_pending = place < num_old
    positions = torch.where(is_pending, positions, 0)
    block_ids = rows.granted_block_ids.gather(1, positions // block_size)
    slots = torch.where(is_pending, block_ids * block_size + positions % block_size, -1)
    starts, ends = positions[:, 0], positions.amax(1) + is_pending.any(1)
    batch = QueryBatch.of_windows(rows.granted_block_ids, starts, width, end_positions=ends)
    tokens = torch.where(is_pending, tokens, 0)
    return ForwardInputs(tokens.flatten(), positions.flatten(), slots.flatten(), (batch,))


def keep_newest(
    rows: RowTensors,
    num_old: torch.Tensor,  # [rows, 1] int64: see old_counts
) -> torch.Tensor:
    """Moves the newest pending token of each row to the first column. Returns [rows] int64: its column
    before."""
    newest = num_old.clamp(min=0)
    rows.pending_tokens[:, :1].copy_(rows.pending_tokens.gather(1, newest))
    is_live = rows.kv_lengths < rows.limits
    rows.pending_counts.copy_(torch.where(is_live, 1, rows.pending_counts))
    return newest[:, 0]
