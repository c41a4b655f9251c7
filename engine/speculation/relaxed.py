"""Relaxed acceptance while a row reasons, LOSSY: drafts that are probable enough for the target are accepted.

The rule is TensorRT-LLM's (`use_relaxed_acceptance_for_thinking`). Nothing of this runs unless the
configuration asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.engine.scheduling.plan import RowSetup
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.transfer import to_device
from headway.kernels import RoundWindow, relax_acceptance


@dataclass(frozen=True, slots=True)
class RelaxedAcceptance:
    """spans: where each row's reasoning begins and ends, by state id, so that moves of rows change nothing.
    They are written when rows are set up; rounds write the phases."""

    spans: torch.Tensor  # [rows, 3] int64: phase, start id, end id, as `relax_acceptance` has them
    top_k: int
    max_gap: float

    @classmethod
    def of_rule(cls, rule: tuple[int, float], num_rows: int, device: torch.device) -> RelaxedAcceptance:
        """rule: top_k and max_gap of the configuration."""
        return cls(torch.zeros((num_rows, 3), dtype=torch.int64, device=device), *rule)

    def set_up(
        self,
        state_ids: torch.Tensor,  # [n] int64: of the rows of the set-ups
        setups: Sequence[RowSetup],
    ) -> None:
        """Overwrites the spans of the rows' previous requests."""
        spans = to_device([setup.reasoning for setup in setups], self.spans.device)
        self.spans.index_copy_(0, state_ids, spans)

    def relax(
        self,
        sampled: torch.Tensor,  # [rows, depth + 1] int64, in place
        logits: torch.Tensor,  # [rows, depth + 1, vocab], raw
        window: RoundWindow,
        rows: RowTensors,
    ) -> None:
        """Overwrites sampled tokens with accepted drafts."""
        relax_acceptance(
            sampled,
            logits,
            window.token_ids,
            window.is_valid,
            rows.state_ids,
            self.spans,
            self.top_k,
            self.max_gap,
        )
