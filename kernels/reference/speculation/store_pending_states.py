"""Stores the hidden states of a round from which later passes of the MTP layer begin (PyTorch twin)."""

from __future__ import annotations

import torch


def store_pending_states(
    states: torch.Tensor,  # [N, S + 1, hidden] float, after each token of the window
    prefill_status: torch.Tensor,  # [N] int64, 1: the row is not changed
    state_ids: torch.Tensor,  # [N] int64: the row's entry of pending_hidden, distinct
    slot_mapping: torch.Tensor,  # [N, S + 1] int64: block id * block size + offset; -1: not in the cache
    pending_counts: torch.Tensor,  # [N] int64, as `verify_and_rewind` wrote them
    pending_hidden: torch.Tensor,  # [entries, >= S + 1, hidden], written
    block_hidden: torch.Tensor,  # [num_blocks + 1, hidden], written; the last belongs to no block
    block_size_tokens: int,
) -> None:
    """Stores the window's hidden states of live rows as pending; those at block ends also in block_hidden.

    They are stored at the places of their tokens: from the first place on or, without drafts (S = 0), at the
    last pending one.
    """
    num_rows, width, _ = states.shape
    places = torch.arange(width, device=states.device).expand(num_rows, width)
    if width == 1:
        places = (pending_counts - 1).clamp(0, pending_hidden.shape[1] - 1)[:, None]
    is_live = (prefill_status == 0)[:, None, None]
    entries = state_ids[:, None]
    pending_hidden[entries, places] = torch.where(is_live, states, pending_hidden[entries, places])
    ends_block = slot_mapping % block_size_tokens == block_size_tokens - 1
    block_ids = torch.where(ends_block, slot_mapping // block_size_tokens, len(block_hidden) - 1)
    block_hidden[block_ids] = states  # -1 // size is -1, the last entry
