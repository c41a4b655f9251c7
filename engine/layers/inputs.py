"""The inputs of one forward pass: its tokens, their positions, and where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.kernels import DraftWindow, QueryBatch, RoundWindow


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """A flat list of tokens, and the batches in which their queries are attended, one launch a layer each."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64: block id * block size + offset; -1: not written
    batches: tuple[QueryBatch, ...]


def inputs_of(
    window: RoundWindow | DraftWindow,
    block_table: torch.Tensor,  # [rows, max_blocks] int64
) -> ForwardInputs:
    """Returns the inputs for one batch of windows, one row each."""
    batch = QueryBatch.of_windows(
        block_table, window.start_positions, window.token_ids.shape[1], end_positions=window.end_positions
    )
    tokens = window.token_ids.flatten(), window.positions.flatten(), window.slot_mapping.flatten()
    return ForwardInputs(*tokens, (batch,))


def concatenate(first: ForwardInputs, second: ForwardInputs) -> ForwardInputs:
    """Returns the inputs for the tokens of both, those of `first` before those of `second`."""
    count = len(first.token_ids)
    return ForwardInputs(
        torch.cat([first.token_ids, second.token_ids]),
        torch.cat([first.positions, second.positions]),
        torch.cat([first.slot_mapping, second.slot_mapping]),
        (*first.batches, *(batch.after(count) for batch in second.batches)),
    )
