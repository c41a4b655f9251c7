"""The protocol of drafters: a drafter sees the target's tokens and hidden states, and proposes tokens.

A draft never changes the text, so that nothing here has to be exact: the state of a drafter only affects its
acceptance rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from headway.engine.layers.causal_lm import TargetStates
from headway.engine.layers.inputs import ForwardInputs
from headway.engine.layers.model_pair import DraftModel, MakeDraft, ModelPair
from headway.engine.protocol.drafters import DRAFTER_TRAITS, DrafterTraits
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.specs import StateSpec
from headway.kernels import RoundWindow


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The n chunks of prompts in one forward pass. Missing chunks are like the first one, with length 0."""

    inputs: ForwardInputs
    rows: torch.Tensor  # [n] int64
    lengths: torch.Tensor  # [n] int64
    first_places: torch.Tensor  # [n] int64: index of each chunk's first token in the flat list
    last_places: torch.Tensor  # [n] int64: index of each chunk's last token in the flat list
    hits: torch.Tensor  # [n] int64: the block that ends before the chunk, found in the prefix cache; -1: none

    def last_places_by_row(self, num_rows: int) -> torch.Tensor:
        """Returns [num_rows] int64: the index of each row's last token in the flat list; -1: the row has no
        chunk."""
        row = torch.arange(num_rows, device=self.rows.device)
        is_of_row = (self.rows == row[:, None]) & (self.lengths > 0)
        return torch.where(is_of_row, self.last_places, -1).amax(1)


class Drafter(Protocol):
    """Proposes drafts, and keeps the state that it needs for that. All methods can be captured in a CUDA
    graph.

    traits: the properties that planning depends on. taps: the layers of the target at whose input it reads
    the residual stream, besides the last state; see `CausalLM.forward`. model: its layers with weights; None:
    it has none.
    """

    traits: DrafterTraits

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def model(self) -> DraftModel | None: ...

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        """Returns [rows, depth] int64: ids for the positions L+1 .. L+depth of each row, any ids for padding.
        depth: 1 or more."""
        ...

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Processes all prompt tokens that the target has computed. states: the hidden states of the target
        for them."""
        ...

    def observe_round(
        self,
        rows: RowTensors,
        window: RoundWindow,
        states: TargetStates,  # of rows * (depth + 1) tokens
    ) -> None:
        """Processes the tokens of a round after they were verified, also at depth 0."""
        ...

    def catch_up(self, rows: RowTensors) -> None:
        """Processes the tokens that rounds without drafts have left pending, so that at most one pair of each
        row stays pending."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterFamily:
    """A kind of drafter. Its traits are in `DRAFTER_TRAITS` under the same name.

    make: makes the drafter for a model, a pool and the rows; max_depth: the most drafts of a round. state:
    declares its state by block and by row besides the state of its layers; max_pending: the most pairs of a
    row that wait for it. make_model: makes its layers, whose weights are loaded with the target's; None: it
    has none, or they are in a folder of their own, which says how they are made (`loading.drafter.maker_of`).
    """

    make: Callable[[ModelPair, StatePool, RowTensors, int], Drafter]  # the last: max_depth
    state: Callable[[ModelPair, int], tuple[StateSpec, ...]]  # the last: max_pending
    make_model: MakeDraft | None = None


class NoDrafter:
    """Never drafts, and has no state."""

    traits = DRAFTER_TRAITS["none"]
    taps: tuple[int, ...] = ()
    model: DraftModel | None = None

    def propose(self, rows: RowTensors, depth: int) -> torch.Tensor:
        raise AssertionError("nothing drafts: depth must be 0")

    def observe_prompts(self, prompts: PromptTokens, states: TargetStates) -> None:
        """Does nothing."""

    def observe_round(self, rows: RowTensors, window: RoundWindow, states: TargetStates) -> None:
        """Does nothing."""

    def catch_up(self, rows: RowTensors) -> None:
        """Does nothing: no tokens are pending."""
