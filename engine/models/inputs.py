"""What one forward pass gets to know: which tokens, where they stand, where their keys and values go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.kernels import DraftWindow, RoundWindow


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of equal width in the flat token list: tokens [first_token, first_token + rows * window).

    A decode round is one segment of `rows` windows; in a prefill neighbouring chunks of equal length share one.
    The query at window place w of a row stands at start_positions[row] + w and attends to every key of
    the row's blocks at or before its own position.
    """

    first_token: int
    rows: int
    window: int
    block_table: torch.Tensor  # [rows, max_blocks] int64, -1 where no block is granted
    start_positions: torch.Tensor  # [rows] int64


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """Flat tokens of all segments."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64: block id * block size + offset; -1: not written
    segments: tuple[Segment, ...]


def inputs_of(
    window: RoundWindow | DraftWindow,
    block_table: torch.Tensor,  # [rows, max_blocks] int64
) -> ForwardInputs:
    """One segment of equal windows, a row each."""
    num_rows, width = window.token_ids.shape
    return ForwardInputs(
        window.token_ids.flatten(),
        window.positions.flatten(),
        window.slot_mapping.flatten(),
        (Segment(0, num_rows, width, block_table, window.start_positions),),
    )
