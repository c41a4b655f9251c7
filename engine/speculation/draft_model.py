"""Drafts from a smaller model of the same vocabulary (Leviathan et al., 2023; Chen et al., 2023): one pass
over the pending tokens, then single steps.

Slot i of its KV cache holds token t_i, in the same blocks as in the target's cache, so that prefix hits,
preemption and compaction need no further code.
"""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.draft_lm import DraftLM
from headway.engine.layers.inputs import inputs_of
from headway.engine.layers.model_pair import ModelPair
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.sampling.sampler import pick_tokens
from headway.engine.speculation.drafter import DrafterFamily, PromptTokens
from headway.engine.speculation.pending import keep_newest, old_counts, old_inputs, old_places
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import RoundWindow, open_drafts


class ModelDrafter:
    """Mutable: it is the only writer of the draft model's keys and values."""

    traits = DRAFTER_TRAITS["draft_model"]
    taps: tuple[int, ...] = ()

    def __init__(self, model: DraftLM, pool: StatePool, *, max_depth: int) -> None:
        self.model, self._pool = model, pool
        self._width = max_depth + 1  # the most tokens that the first pass of a round consumes

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Drafts for positions L+1 .. L+depth of each row, [rows, depth] int64; fills the slots up to L +
        depth - 1. Drafts are sampled with the noise, penalties and bias of the target at the same position.
        Padding rows get arbitrary drafts and write nothing."""
        state, size = rows.state(), self._pool.block_size
        drafts = rows.last_tokens.new_empty((depth, len(rows.last_tokens)))
        # The pending tokens fill slots L - pending + 1 .. L; the last one gives the first draft.
        window = open_drafts(state, rows.pending_tokens[:, : self._width], rows.pending_counts, 0, size)
        hidden = self.model.forward(inputs_of(window, rows.granted_block_ids), self._pool)
        hidden = hidden.index_select(0, window.last_places)
        for step in range(depth):
            if step > 0:
                window = open_drafts(state, drafts[step - 1, :, None], None, step, size)
                hidden = self.model.forward(inputs_of(window, rows.granted_block_ids), self._pool)
            logits, positions = self.model.logits(hidden)[:, None], window.next_positions
            pick_tokens(logits, rows, positions, drafts[:step].T, out=drafts[step, :, None])
        return drafts.T

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Computes the keys and values of every prompt token."""
        self.model.fill_cache(prompts.inputs, self._pool)

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        """Does nothing: the tokens of the round are pending already."""

    def catch_up(self, rows: RowTensors) -> None:
        """Fills the slots of all pending tokens but the newest, which moves to the first position."""
        num_old = old_counts(rows)
        for places in old_places(rows):
            self.model.fill_cache(old_inputs(rows, num_old, places, self._pool.block_size), self._pool)
        keep_newest(rows, num_old)


def _model_of(models: ModelPair) -> DraftLM:
    assert isinstance(models.draft, DraftLM), "the draft model is not loaded"
    return models.draft


FAMILY = DrafterFamily(
    lambda models, pool, rows, max_depth: ModelDrafter(_model_of(models), pool, max_depth=max_depth),
    lambda *_: (),
)
