"""Acceptance at set rates, for measurements: the target's samples are overwritten, so that the text means
nothing.

The work of a round stays the same; only its outcome is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.engine.state.row_tensors import RowTensors
from headway.kernels import RoundWindow, force_acceptance


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """thresholds[i]: draft i + 1 is accepted if those before it were and a random word of 32 bits is below
    it."""

    thresholds: torch.Tensor  # [max depth] int64, 0 .. 2^32
    vocab_size: int

    @classmethod
    def of_rates(cls, rates: Sequence[float], vocab_size: int, device: torch.device) -> SyntheticAcceptance:
        """rates[i]: the share of all rounds in which draft i + 1 is accepted; the rates never rise.

        With 0.9, 0.8, 0.7 a draft is accepted at 0.9, then 0.8 / 0.9, then 0.7 / 0.8 if those before it were:
        3.4 tokens a round.
        """
        return cls(_thresholds(rates).to(device), vocab_size)

    def change_rates(self, rates: Sequence[float]) -> None:
        """Sets the same number of other rates for all rounds that are launched from now on. Requests may be
        running.

        They are written to the same memory, which captured graphs read.
        """
        self.thresholds.copy_(_thresholds(rates))

    def force(
        self,
        picked: torch.Tensor,  # [rows, depth + 1] int64, in place
        window: RoundWindow,
        rows: RowTensors,
    ) -> None:
        """Makes samples agree with the first valid drafts of each row, up to the number that was drawn.

        The number depends on the row's seed and the positions, like the samples themselves, and not on other
        rows.
        """
        force_acceptance(
            picked,
            window.token_ids,
            window.is_valid,
            rows.seeds,
            window.start_positions,
            self.thresholds,
            self.vocab_size,
        )


def _thresholds(rates: Sequence[float]) -> torch.Tensor:
    """Returns [positions] int64."""
    before = [1.0, *rates[:-1]]
    shares = [rate / previous if previous > 0 else 0.0 for rate, previous in zip(rates, before, strict=True)]
    return torch.tensor([round(share * 2**32) for share in shares], dtype=torch.int64)
