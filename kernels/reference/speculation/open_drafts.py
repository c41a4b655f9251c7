"""Builds the inputs of one pass of the MTP layer over each row's newest pairs (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._row_state import DraftWindow, RowState


def open_drafts(
    rows: RowState,
    token_ids: torch.Tensor,  # [N, W] int64
    counts: torch.Tensor | None,  # [N] int64, 1 .. W: tokens of each row; None: W
    ahead: int,
    block_size_tokens: int,
    *,
    out: DraftWindow | None = None,
) -> DraftWindow:
    """Returns the window of each row's tokens, which end at position L + ahead, L = kv_lengths. Tokens from
    the row's limit on are not valid.

    A row of L = 6 with 2 of 4 pending tokens, ahead = 0, and the same row with its first draft, ahead = 1:

        positions 5 6 0 0, next 7        positions 7, next 8
    """
    num_rows, width = token_ids.shape
    is_live = rows.kv_lengths < rows.limits
    there = torch.full_like(rows.kv_lengths, width) if counts is None else counts
    there = torch.where(is_live, there, 0)
    ends = (rows.kv_lengths + ahead) * is_live
    start_positions = (ends - there + 1).clamp(min=0) * is_live
    places = torch.arange(width, device=token_ids.device)
    positions = start_positions[:, None] + places
    is_valid = (places < there[:, None]) & (positions < rows.limits[:, None])
    positions = positions * is_valid
    granted = rows.granted_block_ids.gather(1, positions // block_size_tokens)
    slots = granted * block_size_tokens + positions % block_size_tokens
    window = DraftWindow(
        token_ids=token_ids * is_valid,
        positions=positions,
        slot_mapping=torch.where(is_valid, slots, -1),
        start_positions=start_positions,
        end_positions=torch.minimum(ends + 1, rows.limits) * is_live,
        last_places=torch.arange(num_rows, device=places.device) * width + (there - 1).clamp(min=0),
        next_positions=ends + 1,
    )
    if out is None:
        return window
    for name in DraftWindow.__slots__:
        getattr(out, name).copy_(getattr(window, name))
    return out
