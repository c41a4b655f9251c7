"""Rewinds the KV cache bookkeeping past rejected draft tokens (PyTorch twin).

Knows lengths, offsets and block ids of rows, neither the tokens nor the reason of their rejection.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation._window import check_window


def rewind_kv_cache(
    accepted_counts: torch.Tensor,  # [N] integer
    prefill_status: torch.Tensor,  # [N] integer, 1: prefill row, nothing to rewind
    last_kv_block_offset: torch.Tensor,  # [N] integer, in place
    kv_length_offsets: torch.Tensor,  # [N] integer, in place
    kv_block_counts: torch.Tensor,  # [N] integer, in place
    last_kv_block_id: torch.Tensor,  # [N] integer, in place
    kv_block_ids: torch.Tensor,  # [N, max_blocks] integer, in place
    num_speculative_tokens: int,
    block_size_tokens: int,
    num_active_requests: int | torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Removes rejected tokens from the rows. Returns (blocks_to_release [N], remove_mask [N] bool).

    Every vector may be [N] or [1, N]. With block size 4, 3 drafts and 1 accepted, a row of 10 tokens (window
    included) loses 2:

        blocks   0 1 2 3 | 4 5 6 7 | 8 9        offset 1, 3 blocks
        after    0 1 2 3 | 4 5 6 7              offset (1 - 2) mod 4 = 3, 2 blocks, the third is cleared
    """
    check_window(num_speculative_tokens, block_size_tokens)
    offsets, lengths = last_kv_block_offset.view(-1), kv_length_offsets.view(-1)
    counts, last_ids = kv_block_counts.view(-1), last_kv_block_id.view(-1)
    rows, max_blocks = kv_block_ids.shape
    limit = rows if num_active_requests is None else num_active_requests
    is_active = torch.arange(rows, device=offsets.device) < limit
    can_rewind = is_active & (prefill_status.view(-1) == 0)

    rewound = torch.where(can_rewind, num_speculative_tokens - accepted_counts.view(-1), 0)
    remainder = offsets - rewound
    falls_back = can_rewind & (remainder < 0)
    release = torch.where(is_active, last_ids, 0)

    lengths -= rewound
    offsets.copy_(torch.where(can_rewind, remainder % block_size_tokens, offsets))
    counts -= falls_back.to(counts.dtype)
    # A window may reach past the table's last column: that entry does not exist and needs no clearing.
    column = counts.long().clamp(0, max_blocks - 1)[:, None]
    is_cleared = (falls_back & (counts < max_blocks))[:, None]
    kv_block_ids.scatter_(1, column, torch.where(is_cleared, -1, kv_block_ids.gather(1, column)))
    previous = (counts.long() - 1).clamp(0, max_blocks - 1)[:, None]
    last_ids.copy_(torch.where(falls_back, kv_block_ids.gather(1, previous)[:, 0], last_ids))

    if out is None:
        return release, falls_back
    out[0].copy_(release)
    out[1].copy_(falls_back)
    return out
