"""Acceptance by decree, for measurements: the target's picks are overwritten, so the text means nothing.

Knows rates and ids. The work of a round stays what it is; only its outcome is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.engine.slots import SlotTable

# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its constants as signed integers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """thresholds[i]: draft i + 1 is accepted if those before it were and a random word of 32 bits is below it."""

    thresholds: torch.Tensor  # [max depth] int64, 0 .. 2^32
    vocab_size: int

    @classmethod
    def of_rates(cls, rates: Sequence[float], vocab_size: int, device: torch.device) -> SyntheticAcceptance:
        """rates[i]: how often draft i + 1 is to be accepted, all rounds counted; they never rise.

        0.9, 0.8, 0.7 mean 0.9, then 0.8 / 0.9, then 0.7 / 0.8 of those that get so far: 3.4 tokens a round.
        """
        before = [1.0, *rates[:-1]]
        shares = [
            rate / previous if previous > 0 else 0.0 for rate, previous in zip(rates, before, strict=True)
        ]
        thresholds = [round(share * 2**32) for share in shares]
        return cls(torch.tensor(thresholds, dtype=torch.int64, device=device), vocab_size)

    def force(
        self,
        picked: torch.Tensor,  # [rows, depth + 1] int64
        tokens: torch.Tensor,  # [rows, depth + 1] int64: the window, t_L and the drafts
        rows: SlotTable,
        start_positions: torch.Tensor,  # [rows] int64: L
    ) -> torch.Tensor:
        """[rows, depth + 1] int64: picks that agree with the first drafts of each row, with as many as were drawn.

        A function of the row's seed and the positions, like the picks themselves: not of the other rows.
        """
        drafts, own = tokens[:, 1:], picked[:, :-1]
        depth = drafts.shape[1]
        positions = start_positions[:, None] + torch.arange(1, depth + 1, device=picked.device)
        is_drawn = random_words(rows.seeds[:, None], positions) < self.thresholds[:depth]
        is_accepted = is_drawn.cumprod(dim=1) > 0
        rejecting = torch.where(own == drafts, (drafts + 1) % self.vocab_size, own)
        return torch.cat([torch.where(is_accepted, drafts, rejecting), picked[:, -1:]], dim=1)


def random_words(
    seeds: torch.Tensor,  # integers, broadcast with positions
    positions: torch.Tensor,  # int64
) -> torch.Tensor:
    """int64 in [0, 2^32): a function of (seed, position)."""
    state = seeds + positions * _STEP
    state = (state ^ _shifted(state, 30)) * _FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * _SECOND_FACTOR
    return _shifted(state ^ _shifted(state, 31), 32)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: the sign is a bit like any other."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
