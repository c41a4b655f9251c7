"""Drafts from the model's own MTP head: one pass over the pending pairs, then single steps.

Slot i of the MTP layer's KV cache holds the pair (h_{i-1}, t_i), which predicts t_{i+1}.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import inputs_of
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.sampling.sampler import pick_tokens
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import BlockSpec
from headway.kernels import open_drafts

# (model, pool, rows, depth) -> drafts [rows, depth] int64 for positions L+1 .. L+depth
Drafter = Callable[[CausalLM, StatePool, RowTensors, int], torch.Tensor]


def mtp_state(model: CausalLM) -> tuple[BlockSpec, ...]:
    """Declares what drafts need of each block besides the MTP layer's keys and values: the hidden state of its last token."""
    return () if model.mtp is None else model.mtp.block_state()


def mtp_drafts(model: CausalLM, pool: StatePool, rows: RowTensors, depth: int) -> torch.Tensor:
    """Drafts for positions L+1 .. L+depth of each row; fills the MTP layer's slots up to L + depth - 1.

    The drafter picks with the same noise, penalties, bias and masks as the target does at the same position,
    so that a draft is accepted as often as the two distributions allow. Rows that are padding get rubbish and write nothing.
    """
    head, state, size = _head_of(model), rows.state(), pool.block_size
    drafts = rows.last_tokens.new_empty((depth, len(rows.last_tokens)))
    # The pending pairs fill slots L - pending + 1 .. L; the last one's carry gives the first draft.
    window = open_drafts(state, rows.pending_tokens, rows.pending_counts, 0, size)
    inputs, hidden = inputs_of(window, rows.granted_block_ids), rows.pending_hidden.flatten(0, 1)
    carry = head.draft(inputs, hidden, pool).index_select(0, window.last_places)
    _pick(model, rows, carry, window.next_positions, drafts, 0)
    for step in range(1, depth):
        window = open_drafts(state, drafts[step - 1, :, None], None, step, size)
        carry = head.draft(inputs_of(window, rows.granted_block_ids), carry, pool)
        _pick(model, rows, carry, window.next_positions, drafts, step)
    return drafts.T


def _head_of(model: CausalLM) -> MtpHead:
    assert model.mtp is not None, "the MTP head is not loaded: depth must be 0"
    return model.mtp


def _pick(
    model: CausalLM,
    rows: RowTensors,
    carry: torch.Tensor,  # [rows, hidden]
    positions: torch.Tensor,  # [rows] int64
    drafts: torch.Tensor,  # [depth, rows] int64, line `step` is written; the lines before count as output
    step: int,
) -> None:
    logits = _head_of(model).logits(carry)[:, None]
    pick_tokens(logits, rows, positions, drafts[:step].T, out=drafts[step, :, None])
