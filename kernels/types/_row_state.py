"""Per-row state of a decode round, and the inputs built from it for the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowState:
    """N rows at fixed addresses; a row with kv_lengths >= limits is padding. Everything is int64. Only
    granted_block_ids and pending_tokens may have gaps between rows."""

    last_tokens: torch.Tensor  # [N]: the first token that is not in the cache
    kv_lengths: torch.Tensor  # [N]: tokens in the cache
    limits: torch.Tensor  # [N]: positions at or beyond it are never computed
    depth_caps: torch.Tensor  # [N]: the most drafts of the row
    last_block_offsets: torch.Tensor  # [N]: the offset of the last token in the cache in its block
    block_counts: torch.Tensor  # [N]: blocks in use
    last_block_ids: torch.Tensor  # [N]: the last block in use
    kv_block_ids: torch.Tensor  # [N, max_blocks]: blocks in use, -1 beyond
    granted_block_ids: torch.Tensor  # [N, max_blocks]: blocks that may be used, -1 beyond
    prefill_status: torch.Tensor  # [N]: 1 for rows that the round does not change
    pending_tokens: torch.Tensor  # [N, >= S + 1]: tokens that the MTP layer has not processed
    pending_counts: torch.Tensor  # [N]: the number of these


@dataclass(frozen=True, slots=True)
class RoundWindow:
    """The target's inputs of a round, t_L, d_1 .. d_S of each row; invalid tokens have id 0 at position 0."""

    token_ids: torch.Tensor  # [N, S + 1] int64
    positions: torch.Tensor  # [N, S + 1] int64
    slot_mapping: torch.Tensor  # [N, S + 1] int64: block id * block size + offset; -1: not written
    is_valid: torch.Tensor  # [N, S + 1] bool: within the row's limit and depth cap
    start_positions: torch.Tensor  # [N] int64: L, 0 for padding rows
    end_positions: torch.Tensor  # [N] int64: valid tokens end before it, 0 for padding rows
    next_positions: torch.Tensor  # [N] int64: of the token sampled after the first, 1 for padding rows

    @classmethod
    def empty(cls, num_rows: int, num_speculative_tokens: int, device: torch.device) -> RoundWindow:
        """Returns a window of uninitialised tensors."""
        shape = num_rows, num_speculative_tokens + 1
        token_ids, positions, slot_mapping = torch.empty(
            (3, *shape), dtype=torch.int64, device=device
        ).unbind()
        is_valid = torch.empty(shape, dtype=torch.bool, device=device)
        ends = torch.empty((3, num_rows), dtype=torch.int64, device=device).unbind()
        return cls(token_ids, positions, slot_mapping, is_valid, *ends)


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The MTP layer's inputs of one pass, W pairs of each row; invalid pairs have id 0 at position 0."""

    token_ids: torch.Tensor  # [N, W] int64
    positions: torch.Tensor  # [N, W] int64
    slot_mapping: torch.Tensor  # [N, W] int64: block id * block size + offset; -1: not written
    start_positions: torch.Tensor  # [N] int64: of the first pair, 0 for padding rows
    end_positions: torch.Tensor  # [N] int64: valid pairs end before it, 0 for padding rows
    last_places: torch.Tensor  # [N] int64: the index of each row's last pair in the flat window
    next_positions: torch.Tensor  # [N] int64: the position of the next draft, 1 for padding rows

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> DraftWindow:
        """Returns a window of uninitialised tensors."""
        cells = torch.empty((3, num_rows, width), dtype=torch.int64, device=device).unbind()
        return cls(*cells, *torch.empty((4, num_rows), dtype=torch.int64, device=device).unbind())
