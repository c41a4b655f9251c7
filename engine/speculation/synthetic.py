"""Acceptance at set rates, for measurements: the target's picks are overwritten, so the text means nothing.

Knows rates. The work of a round stays what it is; only its outcome is drawn.
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
        """rates[i]: how often draft i + 1 is to be accepted, all rounds counted; they never rise.

        0.9, 0.8, 0.7 mean 0.9, then 0.8 / 0.9, then 0.7 / 0.8 of those that get so far: 3.4 tokens a round.
        """
        return cls(_thresholds(rates).to(device), vocab_size)

    def change_rates(self, rates: Sequence[float]) -> None:
        """Sets other rates, as many as before, for all rounds that are launched from now on; requests may be
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
        """Makes picks agree with the first valid drafts of each row, up to the number that was drawn.

        A function of the row's seed and the positions, like the picks themselves: not of the other rows.
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
