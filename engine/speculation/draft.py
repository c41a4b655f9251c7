"""Drafts from the model's own MTP head: one pass over the pending pairs, then single steps.

Slot i of the MTP layer's KV cache holds the pair (h_{i-1}, t_i), which predicts t_{i+1}.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import window_inputs
from headway.engine.models.registry import CausalLM
from headway.engine.sampler import pick_tokens
from headway.engine.slots import SlotTable, live_lengths

# (model, pool, rows, depth) -> drafts [rows, depth] int64 for positions L+1 .. L+depth
Drafter = Callable[[CausalLM, KVPool, SlotTable, int], torch.Tensor]


def mtp_drafts(model: CausalLM, pool: KVPool, rows: SlotTable, depth: int) -> torch.Tensor:
    """Drafts for positions L+1 .. L+depth of each row; fills the MTP layer's slots up to L + depth - 1.

    The drafter picks with the same noise, penalties, bias and masks as the target does at the same position,
    so that a draft is accepted as often as the two distributions allow. Rows that are padding get rubbish and write nothing.
    """
    lengths = live_lengths(rows)
    is_live = rows.kv_lengths < rows.limits
    carry = _absorb_pending(model, pool, rows, lengths, is_live, depth)
    drafts = _pick(model, rows, carry, lengths + 1, lengths.new_zeros((len(lengths), 0)))
    for step in range(1, depth):
        slots = lengths + step
        inputs = window_inputs(
            drafts[:, -1:],
            slots,
            (is_live & (slots < rows.limits))[:, None],
            rows.granted_block_ids,
            pool.block_size,
        )
        carry = model.draft(inputs, carry, pool)
        drafts = torch.cat([drafts, _pick(model, rows, carry, slots + 1, drafts)], dim=1)
    return drafts


def _absorb_pending(
    model: CausalLM,
    pool: KVPool,
    rows: SlotTable,
    lengths: torch.Tensor,  # [rows] int64: L, 0 for padding rows
    is_live: torch.Tensor,  # [rows] bool
    depth: int,
) -> torch.Tensor:
    """Fills slots L - pending + 1 .. L with the true pairs; returns the carry at slot L: [rows, hidden]."""
    width = depth + 1
    counts = rows.pending_counts
    places = torch.arange(width, device=counts.device)
    inputs = window_inputs(
        rows.pending_tokens[:, :width],
        (lengths - counts + 1).clamp(min=0),
        is_live[:, None] & (places < counts[:, None]),
        rows.granted_block_ids,
        pool.block_size,
    )
    carry = model.draft(inputs, rows.pending_hidden[:, :width].flatten(0, 1), pool)
    first_of_row = torch.arange(0, len(counts) * width, width, device=counts.device)
    return carry[first_of_row + (counts - 1).clamp(min=0)]


def _pick(
    model: CausalLM, rows: SlotTable, carry: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor
) -> torch.Tensor:
    """[rows, 1] int64, the draft after those given, which count as output."""
    return pick_tokens(model.draft_logits(carry)[:, None], rows, positions, drafts)
