"""Counts the whole window into each live row before the forward pass and hands it its blocks (PyTorch twin).

Does not know how many of the window's tokens will stay: `rewind_kv_cache` removes the rest.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window


def advance(
    kv_length_offsets: torch.Tensor,  # [N] integer, in place: tokens in the cache
    last_kv_block_offset: torch.Tensor,  # [N] integer, in place: the last token's offset in its block
    kv_block_counts: torch.Tensor,  # [N] integer, in place
    last_kv_block_id: torch.Tensor,  # [N] integer, in place
    kv_block_ids: torch.Tensor,  # [N, max_blocks] integer, in place: blocks in use, then -1
    granted_block_ids: torch.Tensor,  # [N, max_blocks] integer: blocks that may be used, then -1
    limits: torch.Tensor,  # [N] integer: rows this long or longer are padding
    prefill_status: torch.Tensor,  # [N] integer, written: 1 for padding, else 0
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None = None,
) -> None:
    """Block size 4, S = 3: a row of 6 tokens becomes one of 10 and takes its third block.

        before   0 1 2 3 | 4 5                  offset 1, 2 blocks
        after    0 1 2 3 | 4 5 6 7 | 8 9        offset 1, 3 blocks, entry 2 copied from the grants

    A window that reaches past what is granted, or past the table, gets -1 there; the tokens at those
    positions lie beyond the row's limit and are never accepted.
    """
    check_window(num_speculative_tokens, block_size_tokens)
    lengths, offsets = kv_length_offsets.view(-1), last_kv_block_offset.view(-1)
    counts, last_ids = kv_block_counts.view(-1), last_kv_block_id.view(-1)
    status = prefill_status.view(-1)
    rows, max_blocks = kv_block_ids.shape
    is_live = lengths < limits.view(-1)
    if num_active_requests is None:
        status.copy_(~is_live)
    else:
        is_active = torch.arange(rows, device=lengths.device) < num_active_requests
        status.copy_(torch.where(is_active, (~is_live).to(status.dtype), status))
        is_live &= is_active

    lengths += is_live * (num_speculative_tokens + 1)
    last_places = lengths - 1
    new_counts = torch.where(is_live, last_places // block_size_tokens + 1, counts)
    offsets.copy_(torch.where(is_live, last_places % block_size_tokens, offsets))
    # At most one block a window, because S < block size: the one at the old count.
    takes_block = new_counts > counts
    column = counts.long().clamp(0, max_blocks - 1)[:, None]
    is_inside = (takes_block & (counts < max_blocks))[:, None]
    granted = torch.where(is_inside, granted_block_ids.gather(1, column), -1)
    old = kv_block_ids.gather(1, column)
    kv_block_ids.scatter_(1, column, torch.where(is_inside, granted.to(old.dtype), old))
    last_ids.copy_(torch.where(takes_block, granted[:, 0].to(last_ids.dtype), last_ids))
    counts.copy_(new_counts)
