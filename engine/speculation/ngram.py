"""Drafts by prompt lookup: where the last tokens of a row have occurred before, the tokens that followed them
are the drafts.

It is prompt lookup decoding (Saxena, 2023), like vLLM's `ngram` method and transformers'
`prompt_lookup_num_tokens`, but on the device: the ids of the tokens in the KV cache are stored in the same
blocks, so that prefix hits, preemption and compaction need no further code. Reads neither weights nor hidden
states.
"""

from __future__ import annotations

import torch

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.model_pair import DraftModel
from headway.engine.protocol.drafters import DRAFTER_TRAITS, MAX_PREDICTION
from headway.engine.speculation.drafter import DrafterFamily, PromptTokens
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import PagedSpec, RowSpec
from headway.kernels import Predictions, RoundWindow, propose_ngram, store_tokens

# The longest suffix that is looked up. transformers uses 2 tokens, the author 3, vLLM 5: longer ones are
# rarer and hardly more reliable. Shorter ones down to 1 token are tried, too, since a round computes its
# whole window in any case.
MAX_NGRAM = 4
# The longest suffix that is looked up in a predicted output (OpenAI's `prediction`). Longer suffixes tell
# repeated lines apart.
MAX_PREDICTED_NGRAM = 16
TOKEN_IDS, PREDICTIONS = "token_ids", "predictions"

# The id of each token in the KV cache, and the prediction of each row.
STATE = (
    PagedSpec(TOKEN_IDS, (), torch.int32),
    RowSpec(PREDICTIONS, (MAX_PREDICTION,), torch.int32, is_scratch=True),
)


class NgramDrafter:
    """Drafts for every model. Mutable: it is the only writer of the token ids in the pool. Predictions are
    written when rows are set up."""

    traits = DRAFTER_TRAITS["ngram"]
    taps: tuple[int, ...] = ()
    model: DraftModel | None = None

    def __init__(self, pool: StatePool) -> None:
        self._token_ids = pool.drafter[TOKEN_IDS]
        self._predictions = pool.drafter[PREDICTIONS]

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Returns [rows, depth] int64: drafts for positions L+1 .. L+depth of each row, 0 for padding."""
        predictions = Predictions(
            self._predictions,
            rows.state_ids,
            rows.prediction_lengths,
            rows.output_starts,
            MAX_PREDICTED_NGRAM,
        )
        return propose_ngram(rows.state(), self._token_ids, depth, MAX_NGRAM, predictions)

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Stores the tokens of the chunks."""
        store_tokens(prompts.inputs.token_ids, prompts.inputs.slot_mapping, self._token_ids)

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        """Stores the tokens of a round's window. Rejected ones are overwritten before the row reaches their
        positions again."""
        store_tokens(window.token_ids.flatten(), window.slot_mapping.flatten(), self._token_ids)

    def catch_up(self, rows: RowTensors) -> None:
        """Does nothing: no tokens are pending."""


FAMILY = DrafterFamily(lambda models, pool, rows, max_depth: NgramDrafter(pool), lambda *_: STATE)
