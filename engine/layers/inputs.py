"""The inputs of one forward pass: its tokens, their positions, and where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.kernels import DraftWindow, QueryBatch, RoundWindow, TokenSpans


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Chunks of prompts in the flat list. They begin at index first_token, from which the indices of the
    spans are counted."""

    spans: TokenSpans
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class RowTokens:
    """Maps the tokens of the flat list to rows, for layers that keep state by row (`RowSpec`).

    The list begins with num_windows windows of `width` tokens, one for each of the table's first rows.
    Verification may reject some of these tokens, so that the state changes only in `commit`. Chunks advance
    the state of their rows at once.
    """

    state_ids: torch.Tensor  # [rows of the table, or num_windows where there are no chunks] int64
    num_windows: int = 0
    width: int = 0
    chunks: ChunkTokens | None = None


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A flat list of tokens, and the batches of their queries for attention, each of which is one launch a
    layer."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64: block id * block size + offset; -1: not written
    batches: tuple[QueryBatch, ...]
    rows: RowTokens | None = None  # None: the pass has no layers that keep state by row


def inputs_of(
    window: RoundWindow | DraftWindow,
    block_table: torch.Tensor,  # [rows, max_blocks] int64
    by_row: RowTokens | None = None,
) -> ForwardInputs:
    """Returns the inputs for one batch of windows, one row each."""
    batch = QueryBatch.of_windows(
        block_table, window.start_positions, window.token_ids.shape[1], end_positions=window.end_positions
    )
    tokens = window.token_ids.flatten(), window.positions.flatten(), window.slot_mapping.flatten()
    return ForwardInputs(*tokens, (batch,), by_row)


def concatenate(first: ForwardInputs, second: ForwardInputs) -> ForwardInputs:
    """Returns the inputs for the tokens of both: the windows of a round first, then chunks of prompts."""
    count, rows = len(first.token_ids), None
    if first.rows is not None and second.rows is not None:
        chunks = second.rows.chunks
        moved = None if chunks is None else replace(chunks, first_token=chunks.first_token + count)
        rows = replace(first.rows, state_ids=second.rows.state_ids, chunks=moved)
    return ForwardInputs(
        torch.cat([first.token_ids, second.token_ids]),
        torch.cat([first.positions, second.positions]),
        torch.cat([first.slot_mapping, second.slot_mapping]),
        (*first.batches, *(batch.after(count) for batch in second.batches)),
        rows,
    )
