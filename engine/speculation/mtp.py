"""Drafts from an MTP head, shipped or trained, or from an EAGLE-3 head: one pass of every layer over the
pending pairs, then single steps. An EAGLE-3 head runs as one MTP layer; a P-EAGLE head makes all drafts in
that one pass.

Slot i of layer 0's KV cache holds the pair (h_{i-1}, t_i), which predicts t_{i+1}. Slot i of layer k > 0
holds the pair of layer k - 1's carry at slot i - 1 and t_i. A row stores the carries at the slot before its
first pending pair. While its prompt is computed, it stores the hidden state of the last computed token at the
first pending position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.eagle3_head import Eagle3Head
from headway.engine.layers.inputs import ForwardInputs, inputs_of
from headway.engine.layers.model_pair import DraftModel, MakeDraft, ModelPair
from headway.engine.layers.mtp_head import MtpHead
from headway.engine.protocol.drafters import DRAFTER_TRAITS, DrafterName, DrafterTraits
from headway.engine.sampling.sampler import in_target_vocabulary, pick_tokens
from headway.engine.speculation.drafter import DrafterFamily, PromptTokens
from headway.engine.speculation.pending import keep_newest, old_counts, old_inputs, old_places
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import BlockSpec, RowSpec, StateSpec
from headway.kernels import DraftWindow, RoundWindow, open_drafts, store_pending_states

BLOCK_HIDDEN, BLOCK_CARRIES = "block_hidden", "block_carries"
PENDING_HIDDEN, CARRIES = "pending_hidden", "carries"


class DraftHead(DraftModel, Protocol):
    """The common interface of an MTP head and an EAGLE-3 head. taps: see Drafter. draft_ids: [draft vocab]
    int64, the target's id of each token of a vocabulary of its own; None: it has the target's."""

    hidden_size: int
    vocab_size: int  # the target's
    dtype: torch.dtype

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def draft_ids(self) -> torch.Tensor | None: ...

    def draft_hidden(self, states: TargetStates) -> torch.Tensor:
        """Returns [n, hidden]: what layer 0 reads of n tokens."""
        ...

    def mask(self) -> tuple[int, torch.Tensor] | None:
        """Returns the token and the state, [hidden], that layer 0 reads in place of a draft if all drafts are
        made in one pass; None: drafts are made one after the other."""
        ...

    def draft(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> torch.Tensor:
        """Runs layer `index` over pairs of hidden states, [tokens, hidden], and tokens. Returns the carries,
        [tokens, hidden]."""
        ...

    def fill_cache(
        self, inputs: ForwardInputs, hidden: torch.Tensor, pool: StatePool, index: int = 0
    ) -> None:
        """Changes the pool as `draft` does."""
        ...

    def logits(self, carry: torch.Tensor, index: int = 0) -> torch.Tensor:
        """carry: [n, hidden] of layer `index`. Returns [n, draft vocab]."""
        ...


def mtp_state(head: DraftHead, max_pending: int) -> tuple[StateSpec, ...]:
    """Declares the state of the drafter besides the MTP layers' keys and values.

    For each block: the hidden state of its last token and, for every layer but the last, the carry there; the
    first pair after a prefix hit is formed with them. For each row: the hidden states of its pending pairs,
    and the carries at the slot before the first of these. max_pending: the most such pairs.
    """
    hidden, dtype, num_carries = head.hidden_size, head.dtype, head.num_layers - 1
    specs: tuple[StateSpec, ...] = (
        BlockSpec(BLOCK_HIDDEN, (hidden,), dtype),
        RowSpec(PENDING_HIDDEN, (max_pending, hidden), dtype, is_scratch=True),
    )
    if num_carries > 0:
        specs += (
            BlockSpec(BLOCK_CARRIES, (num_carries, hidden), dtype),
            RowSpec(CARRIES, (num_carries, hidden), dtype, is_scratch=True),
        )
    return specs


class MtpDrafter:
    """Mutable: it is the only writer of the MTP layers' keys and values and of the state that `mtp_state`
    declares."""

    def __init__(
        self,
        head: DraftHead,
        pool: StatePool,
        rows: RowTensors,  # the whole table
        *,
        max_depth: int,
        traits: DrafterTraits = DRAFTER_TRAITS["mtp"],
    ) -> None:
        self.traits = traits
        assert pool.block_size >= head.num_layers, "slots at the end of a block have no pair in some layer"
        self.model = head
        self._mask = head.mask()
        self._pool = pool
        self._rows = rows
        self._width = max_depth + 1  # the most pairs that the first pass of a round consumes
        self._block_hidden = pool.drafter[BLOCK_HIDDEN]
        self._pending_hidden = pool.drafter[PENDING_HIDDEN]
        # There is one entry for each layer but the last, and none for a single layer.
        self._block_carries = pool.drafter[BLOCK_CARRIES].unbind(1) if BLOCK_CARRIES in pool.drafter else ()
        self._carries = pool.drafter[CARRIES].unbind(1) if CARRIES in pool.drafter else ()

    @property
    def taps(self) -> tuple[int, ...]:
        """Returns those of the head."""
        return self.model.taps

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Drafts for positions L+1 .. L+depth of each row, [rows, depth] int64; fills the MTP layers' slots
        up to L + depth - 1.

        Layer k makes draft k + 1. Every layer runs over the pending pairs, also layers beyond the depth;
        further drafts come from the last layer, which reads its own carry.

        The drafter samples with the same noise, penalties, bias and masks as the target at the same position,
        so that a draft is accepted as often as the two distributions allow. Padding rows get arbitrary drafts
        and write nothing.
        """
        if self._mask is not None:
            return self._propose_at_once(rows, depth, *self._mask)
        head, pool, state, size = self.model, self._pool, rows.state(), self._pool.block_size
        drafts = rows.last_tokens.new_empty((depth, len(rows.last_tokens)))
        # The pending pairs fill slots L - pending + 1 .. L; the last one's carry gives the first draft.
        pending = slice(0, self._width)
        window = open_drafts(state, rows.pending_tokens[:, pending], rows.pending_counts, 0, size)
        inputs, hidden = inputs_of(window, rows.granted_block_ids), self._pending_states(rows, pending)
        carries = head.draft(inputs, hidden.flatten(0, 1), pool)
        carry = carries.index_select(0, window.last_places)
        self._pick(rows, head.logits(carry), window.next_positions, drafts, 0)
        for layer in range(1, head.num_layers):
            hidden = self._advance(rows, layer, carries, inputs.slot_mapping, rows.pending_counts)
            is_drafting = layer < depth
            wide = self._with_drafts(rows, drafts[:layer]) if is_drafting else window
            carries = self._run_wide(rows, layer, wide, hidden)
            if is_drafting:
                carry = carries.index_select(0, wide.last_places)
                self._pick(rows, head.logits(carry, layer), wide.next_positions, drafts, layer)
        for step in range(head.num_layers, depth):
            window = open_drafts(state, drafts[step - 1, :, None], None, step, size)
            carry = head.draft(inputs_of(window, rows.granted_block_ids), carry, pool, head.num_layers - 1)
            logits = head.logits(carry, head.num_layers - 1)
            self._pick(rows, logits, window.next_positions, drafts, step)
        return drafts.T

    def _propose_at_once(
        self,
        rows: RowTensors,
        depth: int,
        token: int,
        state: torch.Tensor,  # [hidden]
    ) -> torch.Tensor:
        """Does what `propose` does, in one pass over the pending pairs and depth - 1 pairs of the mask's
        token and state: for L = 6 with 2 pending pairs and 3 drafts

            the pairs of slots 5 and 6, then the mask at 7 and 8; the carries at 6, 7 and 8 give the drafts
            for 7, 8 and 9
        """
        num_rows = len(rows.last_tokens)
        window = self._with_drafts(rows, rows.last_tokens.new_full((depth - 1, num_rows), token))
        pending = self._pending_states(rows, slice(0, self._width))
        places = torch.arange(window.token_ids.shape[1], device=pending.device)
        is_pending = places < rows.pending_counts.clamp(max=self._width)[:, None]
        hidden = torch.where(is_pending[..., None], F.pad(pending, (0, 0, 0, depth - 1)), state)
        carries = self.model.draft(
            inputs_of(window, rows.granted_block_ids), hidden.flatten(0, 1), self._pool
        )
        steps = torch.arange(depth, device=carries.device)
        drafting = (window.last_places - (depth - 1) + steps[:, None]).clamp(min=0)
        logits = self.model.logits(carries.index_select(0, drafting.flatten()))
        first = (window.next_positions - (depth - 1)).clamp(min=1)
        drafts = rows.last_tokens.new_empty((depth, num_rows))
        for step, of_step in enumerate(logits.view(depth, num_rows, -1).unbind()):
            self._pick(rows, of_step, first + step, drafts, step)
        return drafts.T

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Runs the MTP layers over all prompt tokens: slot i of layer 0 gets the pair (h_{i-1}, t_i); slot 0
        does not exist."""
        inputs, ids = prompts.inputs, self._rows.state_ids.index_select(0, prompts.rows)
        hidden = self.model.draft_hidden(states)
        newest = self._pending_hidden[:, 0]
        own = newest.index_select(0, ids)
        before = torch.where((prompts.hits < 0)[:, None], own, self._block_hidden[prompts.hits])
        previous = hidden.roll(1, 0).index_copy_(0, prompts.first_places, before)
        # A row that begins to decode has as its first pair the last hidden state and the token sampled after
        # it.
        newest.index_copy_(0, ids, hidden.index_select(0, prompts.last_places))
        # The state of a rejected token is overwritten by that of the true one before the block is published.
        self._block_hidden[self._pool.ended_blocks(inputs.slot_mapping)] = hidden
        first = _from_position(inputs, 1)
        self._fill_layers(first, previous, lambda k, carries: self._advance_prompts(prompts, ids, k, carries))

    def _advance_prompts(
        self,
        prompts: PromptTokens,
        ids: torch.Tensor,  # [n] int64: of the state of the prompts' rows
        layer: int,
        carries: torch.Tensor,  # [tokens, hidden], of layer - 1
    ) -> torch.Tensor:
        """Stores the carries for the chunks that follow. Returns the input of the layer, [tokens, hidden]."""
        own, kept = self._carries[layer - 1], self._block_carries[layer - 1]
        before = torch.where((prompts.hits < 0)[:, None], own.index_select(0, ids), kept[prompts.hits])
        own.index_copy_(0, ids, carries.index_select(0, prompts.last_places))
        kept[self._pool.ended_blocks(prompts.inputs.slot_mapping)] = carries
        return carries.roll(1, 0).index_copy_(0, prompts.first_places, before)

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        """Stores the pairs (h_L, s_{L+1}) .. (h_{L+a}, s_{L+a+1}) for the next round's first MTP pass."""
        num_rows, width = window.token_ids.shape
        store_pending_states(
            self.model.draft_hidden(states).view(num_rows, width, -1),
            rows.prefill_status,
            rows.state_ids,
            window.slot_mapping,
            rows.pending_counts,
            self._pending_hidden,
            self._block_hidden,
            self._pool.block_size,
        )

    def catch_up(self, rows: RowTensors) -> None:
        """Fills the slots of all pending pairs but the newest, which moves to the first position. It handles
        some positions of all rows at a time. Padding, and rows whose prompts are being computed, stay as they
        are."""
        num_old = old_counts(rows)
        for places in old_places(rows):
            self._fill_pending(rows, num_old, places)
        states = self._pending_hidden[rows.state_ids, keep_newest(rows, num_old)]
        self._pending_hidden[:, 0].index_copy_(0, rows.state_ids, states)

    def _fill_pending(
        self,
        rows: RowTensors,
        num_old: torch.Tensor,  # [rows, 1] int64: pairs to be filled
        places: slice,
    ) -> None:
        inputs = old_inputs(rows, num_old, places, self._pool.block_size)
        hidden = self._pending_states(rows, places)
        width = hidden.shape[1]
        counts = (num_old[:, 0] - places.start).clamp(max=width)

        def advance(layer: int, carries: torch.Tensor) -> torch.Tensor:
            return self._advance(rows, layer, carries, inputs.slot_mapping, counts)[:, :width].flatten(0, 1)

        self._fill_layers(inputs, hidden.flatten(0, 1), advance)

    def _fill_layers(
        self,
        inputs: ForwardInputs,
        hidden: torch.Tensor,  # [tokens, hidden], for layer 0
        advance: Callable[
            [int, torch.Tensor], torch.Tensor
        ],  # the input of a layer, made of the carries of the layer before
    ) -> None:
        """Fills the slots of every layer."""
        last = self.model.num_layers - 1
        for layer in range(last):
            hidden = advance(layer + 1, self.model.draft(inputs, hidden, self._pool, layer))
            inputs = _from_position(inputs, layer + 2)
        self.model.fill_cache(inputs, hidden, self._pool, last)

    def _advance(
        self,
        rows: RowTensors,
        layer: int,
        carries: torch.Tensor,  # [rows * W, hidden], of layer - 1 over windows whose first pairs are the pending ones
        slot_mapping: torch.Tensor,  # [rows * pairs] int64: slots of the pending pairs, -1 elsewhere
        counts: torch.Tensor,  # [rows] int64: pairs of each row that are final after this pass; 0 or less: none
    ) -> torch.Tensor:
        """Stores the carries of the final pairs. Returns [rows, W + 1, hidden]: the carry before each pair of
        the layer."""
        num_rows, own = len(rows.last_tokens), self._carries[layer - 1]
        previous = carries.view(num_rows, -1, carries.shape[1])
        shifted = torch.cat([own.index_select(0, rows.state_ids)[:, None], previous], dim=1)
        pairs = len(slot_mapping) // num_rows
        ended = self._pool.ended_blocks(slot_mapping)
        self._block_carries[layer - 1][ended] = previous[:, :pairs].flatten(0, 1)
        # Stores the carry before the first pair that is not final; a row without final pairs keeps its carry.
        num_final = torch.where(rows.kv_lengths < rows.limits, counts.clamp(0, pairs), 0)
        index = num_final[:, None, None].expand(-1, 1, carries.shape[1])
        own.index_copy_(0, rows.state_ids, shifted.gather(1, index)[:, 0])
        return shifted

    def _pending_states(self, rows: RowTensors, places: slice) -> torch.Tensor:
        """Returns [rows, places, hidden]: the hidden states of the pending pairs at these positions."""
        return self._pending_hidden[:, places].index_select(0, rows.state_ids)

    def _with_drafts(
        self,
        rows: RowTensors,
        drafts: torch.Tensor,  # [drafts, rows] int64
    ) -> DraftWindow:
        """Returns windows of the pending pairs followed by the drafts."""
        num_drafts = len(drafts)
        counts = rows.pending_counts.clamp(max=self._width)
        pending = rows.pending_tokens[:, : self._width]
        tokens = torch.cat([pending, drafts.T], dim=1)
        places = counts[:, None] + torch.arange(num_drafts, device=tokens.device)
        tokens.scatter_(1, places, drafts.T)
        return open_drafts(rows.state(), tokens, counts + num_drafts, num_drafts, self._pool.block_size)

    def _run_wide(
        self,
        rows: RowTensors,
        layer: int,
        window: DraftWindow,
        hidden: torch.Tensor,  # [rows, at least W, hidden]
    ) -> torch.Tensor:
        """Runs a layer over windows of W pairs. Returns its carries, [rows * W, hidden]."""
        inputs = _from_position(inputs_of(window, rows.granted_block_ids), layer + 1)
        pairs = hidden[:, : window.token_ids.shape[1]].flatten(0, 1)
        return self.model.draft(inputs, pairs, self._pool, layer)

    def _pick(
        self,
        rows: RowTensors,
        logits: torch.Tensor,  # [rows, draft vocab]
        positions: torch.Tensor,  # [rows] int64
        drafts: torch.Tensor,  # [depth, rows] int64, line `step` is written; the lines before count as output
        step: int,
    ) -> None:
        spread = logits[:, None]
        if self.model.draft_ids is not None:
            spread = in_target_vocabulary(spread, self.model.draft_ids, self.model.vocab_size)
        pick_tokens(spread, rows, positions, drafts[:step].T, out=drafts[step, :, None])


def _from_position(inputs: ForwardInputs, first: int) -> ForwardInputs:
    """Returns inputs that write nothing to slots before that position."""
    return replace(inputs, slot_mapping=torch.where(inputs.positions < first, -1, inputs.slot_mapping))


def _head_of(models: ModelPair) -> DraftHead:
    assert isinstance(models.draft, MtpHead | Eagle3Head), "the head is not loaded"
    return models.draft


def _family(name: DrafterName, make_model: MakeDraft | None = None) -> DrafterFamily:
    traits = DRAFTER_TRAITS[name]
    return DrafterFamily(
        lambda models, pool, rows, max_depth: MtpDrafter(
            _head_of(models), pool, rows, max_depth=max_depth, traits=traits
        ),
        lambda models, max_pending: mtp_state(_head_of(models), max_pending),
        make_model,
    )


FAMILY = _family("mtp", MtpHead)
# These are read from a folder, which says how their layers are made.
EAGLE3_FAMILY, TRAINED_FAMILY = _family("eagle3"), _family("trained_head")
