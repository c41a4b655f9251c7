"""Drafts from the model's own MTP head: one pass over the pending pairs, then single steps.

Slot i of the MTP layer's KV cache holds the pair (h_{i-1}, t_i), which predicts t_{i+1}.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import ForwardInputs, inputs_of
from headway.engine.sampling.sampler import pick_tokens
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import BlockSpec
from headway.kernels import QueryBatch, RoundWindow, open_drafts, store_pending_states

# Places whose pairs one pass of catching up computes, of all rows.
CAUGHT_UP_AT_ONCE = 16


def mtp_state(model: CausalLM) -> tuple[BlockSpec, ...]:
    """Declares what drafts need of each block besides the MTP layer's keys and values: the hidden state of its last token."""
    return () if model.mtp is None else model.mtp.block_state()


class MtpDrafter:
    """Mutable: it is the only writer of the MTP layer's keys and values, of the pool's block_hidden, and of the columns
    pending_hidden and chunk_hidden of the rows."""

    def __init__(
        self,
        model: CausalLM,
        pool: StatePool,
        rows: RowTensors,  # all of the table
        *,
        max_depth: int,
    ) -> None:
        assert model.mtp is not None, "the MTP head is not loaded"
        assert pool.block_hidden is not None, "drafts need block_hidden"
        self._head = model.mtp
        self._pool = pool
        self._rows = rows
        self._width = max_depth + 1  # the most pairs that the first pass of a round consumes
        self._block_hidden = pool.block_hidden

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Drafts for positions L+1 .. L+depth of each row, [rows, depth] int64; fills the MTP layer's slots up to L + depth - 1.

        The drafter picks with the same noise, penalties, bias and masks as the target does at the same position,
        so that a draft is accepted as often as the two distributions allow. Rows that are padding get rubbish and write nothing.
        """
        head, pool, state, size = self._head, self._pool, rows.state(), self._pool.block_size
        drafts = rows.last_tokens.new_empty((depth, len(rows.last_tokens)))
        # The pending pairs fill slots L - pending + 1 .. L; the last one's carry gives the first draft.
        pending = slice(0, self._width)
        window = open_drafts(state, rows.pending_tokens[:, pending], rows.pending_counts, 0, size)
        inputs, hidden = inputs_of(window, rows.granted_block_ids), rows.pending_hidden[:, pending]
        carry = head.draft(inputs, hidden.flatten(0, 1), pool).index_select(0, window.last_places)
        self._pick(rows, carry, window.next_positions, drafts, 0)
        for step in range(1, depth):
            window = open_drafts(state, drafts[step - 1, :, None], None, step, size)
            carry = head.draft(inputs_of(window, rows.granted_block_ids), carry, pool)
            self._pick(rows, carry, window.next_positions, drafts, step)
        return drafts.T

    def observe_prompts(self, prompts: PromptTokens, hidden: torch.Tensor) -> None:
        """The MTP layer sees every prompt token: slot i gets the pair (h_{i-1}, t_i); slot 0 does not exist."""
        rows, inputs = self._rows, prompts.inputs
        states = self._head.draft_hidden(hidden)
        own = rows.chunk_hidden.index_select(0, prompts.rows)
        before = torch.where((prompts.hits < 0)[:, None], own, self._block_hidden[prompts.hits])
        previous = states.roll(1, 0).index_copy_(0, prompts.first_places, before)
        last = states.index_select(0, prompts.last_places)
        rows.chunk_hidden.index_copy_(0, prompts.rows, last)
        # The first pair of a row that begins to decode is (the last one, the token sampled after it).
        rows.pending_hidden[:, 0].index_copy_(0, prompts.rows, last)
        self._pool.keep_hidden(inputs.slot_mapping, states)
        slot_mapping = torch.where(inputs.positions == 0, -1, inputs.slot_mapping)
        self._head.fill_cache(replace(inputs, slot_mapping=slot_mapping), previous, self._pool)

    def observe_round(self, rows: RowTensors, window: RoundWindow, hidden: torch.Tensor) -> None:
        """(h_L, s_{L+1}) .. (h_{L+a}, s_{L+a+1}) wait for the next round's first MTP pass."""
        num_rows, width = window.token_ids.shape
        store_pending_states(
            self._head.draft_hidden(hidden).view(num_rows, width, -1),
            rows.prefill_status,
            window.slot_mapping,
            rows.pending_counts,
            rows.pending_hidden,
            self._block_hidden,
            self._pool.block_size,
        )

    def catch_up(self, rows: RowTensors) -> None:
        """Fills the slots of all pending pairs but the newest, which moves to the first place, some places of all rows at a
        time. Padding and rows whose prompts are being computed stay as they are."""
        is_live = rows.kv_lengths < rows.limits
        num_old = torch.where(is_live, rows.pending_counts - 1, 0)[:, None]
        for first in range(0, rows.pending_tokens.shape[1] - 1, CAUGHT_UP_AT_ONCE):
            self._fill_pending(rows, num_old, slice(first, first + CAUGHT_UP_AT_ONCE))
        newest = num_old.clamp(min=0)
        rows.pending_tokens[:, :1].copy_(rows.pending_tokens.gather(1, newest))
        index = newest[..., None].expand(-1, -1, rows.pending_hidden.shape[2])
        rows.pending_hidden[:, :1].copy_(rows.pending_hidden.gather(1, index))
        rows.pending_counts.copy_(torch.where(is_live, 1, rows.pending_counts))

    def _fill_pending(
        self,
        rows: RowTensors,
        num_old: torch.Tensor,  # [rows, 1] int64: pairs to be filled
        places: slice,
    ) -> None:
        tokens, hidden = rows.pending_tokens[:, places], rows.pending_hidden[:, places]
        width, size = tokens.shape[1], self._pool.block_size
        place = torch.arange(places.start, places.start + width, device=tokens.device)
        positions = rows.kv_lengths[:, None] - num_old + place
        is_pending = place < num_old
        positions = torch.where(is_pending, positions, 0)
        block_ids = rows.granted_block_ids.gather(1, positions // size)
        slots = torch.where(is_pending, block_ids * size + positions % size, -1)
        starts, ends = positions[:, 0], positions.amax(1) + is_pending.any(1)
        batch = QueryBatch.of_windows(rows.granted_block_ids, starts, width, end_positions=ends)
        tokens = torch.where(is_pending, tokens, 0)
        inputs = ForwardInputs(tokens.flatten(), positions.flatten(), slots.flatten(), (batch,))
        self._head.fill_cache(inputs, hidden.flatten(0, 1), self._pool)

    def _pick(
        self,
        rows: RowTensors,
        carry: torch.Tensor,  # [rows, hidden]
        positions: torch.Tensor,  # [rows] int64
        drafts: torch.Tensor,  # [depth, rows] int64, line `step` is written; the lines before count as output
        step: int,
    ) -> None:
        logits = self._head.logits(carry)[:, None]
        pick_tokens(logits, rows, positions, drafts[:step].T, out=drafts[step, :, None])
