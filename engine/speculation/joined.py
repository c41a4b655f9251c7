"""N-gram lookup together with another drafter: in each row the one drafts that was right more often lately.

Both propose in every round, and both proposals are compared with the target's tokens, as far as the round has
any. So the one that does not draft is judged, too. A row's choice depends on its own text only.
"""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.model_pair import DraftModel, ModelPair
from headway.engine.protocol.config import MAX_DEPTH
from headway.engine.protocol.drafters import DRAFTER_TRAITS, JOINED, DrafterName
from headway.engine.speculation import ngram
from headway.engine.speculation.drafter import Drafter, DrafterFamily, PromptTokens
from headway.engine.speculation.ngram import NgramDrafter
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import RowSpec
from headway.kernels import RoundWindow

# The weight of a round in a row's moving average, so that about the last four rounds decide.
WEIGHT = 0.25
PROPOSED, NUM_RIGHT = "proposed", "num_right"

# The drafts of the round and the average number of accepted ones, by row: first of the other drafter, then of
# n-gram lookup.
STATE = (
    RowSpec(PROPOSED, (2, MAX_DEPTH), torch.int64, is_scratch=True),
    RowSpec(NUM_RIGHT, (2,), torch.float32, is_scratch=True),
)


class JoinedDrafter:
    """Mutable: it is the only writer of the state that STATE declares. The two drafters write their own
    state."""

    def __init__(
        self,
        other: Drafter,
        ngrams: NgramDrafter,
        pool: StatePool,
        rows: RowTensors,  # all of the table
        name: DrafterName,
    ) -> None:
        self.traits = DRAFTER_TRAITS[name]
        self._other, self._ngrams, self._rows = other, ngrams, rows
        self._proposed, self._num_right = pool.drafter[PROPOSED], pool.drafter[NUM_RIGHT]

    @property
    def taps(self) -> tuple[int, ...]:
        """Returns the taps of the other drafter."""
        return self._other.taps

    @property
    def model(self) -> DraftModel | None:
        """Returns the model of the other drafter."""
        return self._other.model

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Returns [rows, depth] int64: for each row the drafts of one of the two, those of the other drafter
        if both are equally good."""
        ids = rows.state_ids
        drafts = self._other.propose(rows, depth)
        found = self._ngrams.propose(rows, depth)
        self._proposed[:, :, :depth].index_copy_(0, ids, torch.stack((drafts, found), dim=1))
        of_other, of_ngrams = self._num_right.index_select(0, ids).unbind(1)
        takes_ngrams = (of_ngrams > of_other) & (rows.joins_ngrams != 0)
        return torch.where(takes_ngrams[:, None], found, drafts)

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Resets the averages of rows whose prompts are computed. Rows with a prediction begin with n-gram
        lookup."""
        self._other.observe_prompts(prompts, states)
        self._ngrams.observe_prompts(prompts, states)
        has_prediction = self._rows.prediction_lengths.index_select(0, prompts.rows) > 0
        begins = torch.stack((torch.zeros_like(has_prediction), has_prediction), dim=1)
        ids = self._rows.state_ids.index_select(0, prompts.rows)
        self._num_right.index_copy_(0, ids, begins.to(self._num_right.dtype))

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        """Compares both proposals with the tokens of the round, which are pending."""
        self._other.observe_round(rows, window, states)
        self._ngrams.observe_round(rows, window, states)
        depth = window.token_ids.shape[1] - 1
        if depth == 0:
            return
        ids = rows.state_ids
        proposed = self._proposed[:, :, :depth].index_select(0, ids)
        is_known = torch.arange(depth, device=ids.device) < rows.pending_counts[:, None]
        is_right = (proposed == rows.pending_tokens[:, None, :depth]) & is_known[:, None]
        num_right = is_right.cumprod(2).sum(2)
        before = self._num_right.index_select(0, ids)
        is_live = (rows.prefill_status == 0)[:, None]
        after = torch.where(is_live, before.lerp(num_right.to(before.dtype), WEIGHT), before)
        self._num_right.index_copy_(0, ids, after)

    def catch_up(self, rows: RowTensors) -> None:
        """Lets the other drafter catch up; n-gram lookup has nothing pending."""
        self._other.catch_up(rows)


def with_ngrams(name: DrafterName, family: DrafterFamily) -> DrafterFamily:
    """Returns the family of a drafter joined by n-gram lookup. name: the name of the drafter alone."""

    def make(models: ModelPair, pool: StatePool, rows: RowTensors, max_depth: int) -> JoinedDrafter:
        other = family.make(models, pool, rows, max_depth)
        return JoinedDrafter(other, NgramDrafter(pool), pool, rows, JOINED[name])

    return DrafterFamily(
        make,
        lambda models, max_pending: (*family.state(models, max_pending), *ngram.STATE, *STATE),
        family.make_model,
    )
