"""Advances an autoregressive drafter by one token per request (PyTorch twin)."""

from __future__ import annotations

import torch


def advance_draft_step(
    positions: torch.Tensor,  # [R] integer: of the last tokens that the drafter has processed
    block_table: torch.Tensor,  # [R, max_blocks] integer
    seq_lens: torch.Tensor,  # [R] integer, in place
    block_size: int,
    max_model_len: int,
    out_positions: torch.Tensor,  # [>= R] integer, written; may be `positions`
    out_slot_mapping: torch.Tensor,  # [>= input_batch_size] integer, written
    input_batch_size: int | None = None,  # the graph's requests; None: R
) -> None:
    """Writes the next positions and their slots, block id * block_size + offset, and increments the lengths.

    A request whose new position is not below max_model_len gets position 0, slot -1 and length 1, so that its
    keys and values are not stored and its attention is cheap. Lengths are limited to max_model_len, and
    columns of the block table to its width. Slots from R to input_batch_size are -1; nothing else is written
    there. With blocks of 4 and max_model_len 8:

        positions 2 3 7   table 5 6     new positions 3 4 0   slots  23 32 -1
                                9 8
                                1 2

    Semantics as in vLLM's `eagle_step_update_slot_mapping_and_metadata`. The engine's drafters use
    `open_drafts` instead, which computes slots by the same device function and ends a row at its own limit.
    """
    num_requests = len(positions)
    new = positions + 1
    is_inside = new < max_model_len
    new = torch.where(is_inside, new, 0)
    columns = (new.long() // block_size).clamp(max=block_table.shape[1] - 1)
    slots = block_table.gather(1, columns[:, None])[:, 0].long() * block_size + new % block_size
    end = num_requests if input_batch_size is None else input_batch_size
    out_positions[:num_requests] = new
    out_slot_mapping[:num_requests] = torch.where(is_inside, slots, -1)
    out_slot_mapping[num_requests:end] = -1
    seq_lens.copy_(torch.where(is_inside, (seq_lens + 1).clamp(max=max_model_len), 1))
