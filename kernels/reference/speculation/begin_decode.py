"""Marks prefilled rows as decoding (PyTorch twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._row_state import RowState


def begin_decode(
    rows: RowState,  # in place: all but limits, depth_caps, grants and prefill_status
    index: torch.Tensor,  # [n] int64: rows, each once
    tokens: torch.Tensor,  # [n] int64: the tokens after their prompts, the first that are not in the cache
    lengths: torch.Tensor,  # [n] int64: of the prompts, 1 or more, in granted blocks
    block_size_tokens: int,
) -> None:
    """Makes these rows take part in rounds from the next round on."""
    counts = (lengths + block_size_tokens - 1) // block_size_tokens
    granted = rows.granted_block_ids[index]
    places = torch.arange(granted.shape[1], device=index.device)
    rows.last_tokens[index] = tokens
    rows.pending_tokens[index, 0] = tokens
    rows.pending_counts.index_fill_(0, index, 1)
    rows.kv_lengths[index] = lengths
    rows.last_block_offsets[index] = (lengths - 1) % block_size_tokens
    rows.block_counts[index] = counts
    rows.last_block_ids[index] = granted.gather(1, counts[:, None] - 1)[:, 0]
    rows.kv_block_ids[index] = torch.where(places < counts[:, None], granted, -1)
