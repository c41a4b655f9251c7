"""Builds the target's inputs for K + 1 tokens per row and advances the lengths (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window
from headway.kernels.types._row_state import RoundWindow, RowState


def prepare_verify_inputs(
    rows: RowState,  # lengths, blocks and prefill_status in place
    drafts: torch.Tensor,  # [N, S] int64
    block_size_tokens: int,
    *,
    out: RoundWindow | None = None,
) -> RoundWindow:
    """Returns the window [t_L, d_1 .. d_S] of each row, and adds its tokens to the lengths of live rows.

    A draft beyond the row's limit or depth cap is not valid. S = 3, blocks of 4, a row of 6 tokens with
    limit 9 and granted blocks 5, 7, 2:

        positions 6 7 8 0    slots 7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, -1    valid 1 1 1 0
    """
    depth = drafts.shape[1]
    check_window(depth, block_size_tokens)
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
    _advance(rows, depth, block_size_tokens)
    if out is None:
        return window
    for name in RoundWindow.__slots__:
        getattr(out, name).copy_(getattr(window, name))
    return out


def _advance(rows: RowState, depth: int, block_size: int) -> None:
    """Adds the depth + 1 tokens of a window to each live row's length and allocates the block that they
    reach.

    Block size 4, depth 3: a row of 6 tokens becomes one of 10 and takes its third block.

        before   0 1 2 3 | 4 5                  offset 1, 2 blocks
        after    0 1 2 3 | 4 5 6 7 | 8 9        offset 1, 3 blocks, entry 2 copied from the grants

    A window that reaches past what is granted, or past the table, gets -1 there; the tokens at those
    positions lie beyond the row's limit and are never accepted.
    """
    is_live = rows.kv_lengths < rows.limits
    rows.prefill_status.copy_(~is_live)
    rows.kv_lengths.add_(is_live * (depth + 1))
    last_places, counts, table = rows.kv_lengths - 1, rows.block_counts, rows.kv_block_ids
    new_counts = torch.where(is_live, last_places // block_size + 1, counts)
    rows.last_block_offsets.copy_(torch.where(is_live, last_places % block_size, rows.last_block_offsets))
    # At most one block a window, because depth < block size: the one at the old count.
    takes_block = new_counts > counts
    column = counts.clamp(0, table.shape[1] - 1)[:, None]
    is_inside = (takes_block & (counts < table.shape[1]))[:, None]
    granted = torch.where(is_inside, rows.granted_block_ids.gather(1, column), -1)
    table.scatter_(1, column, torch.where(is_inside, granted, table.gather(1, column)))
    rows.last_block_ids.copy_(torch.where(takes_block, granted[:, 0], rows.last_block_ids))
    counts.copy_(new_counts)
