"""Builds the target's inputs for K+1 tokens a row and advances the lengths (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.advance import advance
from headway.kernels.types._row_state import RoundWindow, RowState


def prepare_verify_inputs(
    rows: RowState,  # lengths, blocks and prefill_status in place, as by `advance`
    drafts: torch.Tensor,  # [N, S] int64
    block_size_tokens: int,
    *,
    out: RoundWindow | None = None,
) -> RoundWindow:
    """The window [t_L, d_1 .. d_S] of each row; a draft beyond the row's limit or depth cap is not valid.

    S = 3, blocks of 4, a row of 6 tokens with limit 9 and granted blocks 5, 7, 2:

        positions 6 7 8 0    slots 7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, -1    valid 1 1 1 0
    """
    depth = drafts.shape[1]
    places = torch.arange(depth + 1, device=drafts.device)
    room = torch.minimum(rows.limits - rows.kv_lengths, rows.depth_caps + 1)
    is_valid = places < room[:, None]
    start_positions = rows.kv_lengths * (rows.kv_lengths < rows.limits)
    positions = (start_positions[:, None] + places) * is_valid
    granted = rows.granted_block_ids.gather(1, positions // block_size_tokens)
    slots = granted * block_size_tokens + positions % block_size_tokens
    window = RoundWindow(
        token_ids=torch.cat([rows.last_tokens[:, None], drafts], dim=1) * is_valid,
        positions=positions,
        slot_mapping=torch.where(is_valid, slots, -1),
        is_valid=is_valid,
        start_positions=start_positions,
        end_positions=start_positions + is_valid.sum(1),
        next_positions=start_positions + 1,
    )
    advance(
        rows.kv_lengths,
        rows.last_block_offsets,
        rows.block_counts,
        rows.last_block_ids,
        rows.kv_block_ids,
        rows.granted_block_ids,
        rows.limits,
        rows.prefill_status,
        depth,
        block_size_tokens,
    )
    if out is None:
        return window
    for name in RoundWindow.__slots__:
        getattr(out, name).copy_(getattr(window, name))
    return out
