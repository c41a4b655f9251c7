"""Chooses the depth of a round: the one with the most expected tokens a second, and at times another one to
learn about it.

All rows of a round have one depth. A round is padded to rows x (depth + 1) tokens, in which a masked draft
costs as much as a draft: masking the drafts of some rows would save no time and lose tokens. docs/design.md
says what rounds of unequal windows could gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.engine.scheduling.depth.acceptance import Acceptance, Kind, Record
from headway.engine.scheduling.depth.costs import CostTable, RoundLoad

# The share of the time that may be lost by rounds of another depth than the best: of the next deeper one,
# which shows the acceptance of the first draft that is not tried otherwise, and of all others together.
_NEXT_SHARE, _OTHERS_SHARE = 0.0035, 0.0015
# The most time that is saved up for a depth, in rounds, unless the depth is expected to lose more.
_MOST_SAVED_ROUNDS = 4.0
# One round in N may have another depth than the best, where N is half its number of rows, within these
# bounds. The loss of a depth that seems about as good is not known well, and a GPU lowers its clock in deep
# rounds, which slows down the rounds after them.
_LEAST_PERIOD, _MOST_PERIOD = 2.0, 16.0
# A change between no drafts and some must gain back, within this many rounds, the time in which the drafter
# catches up.
_CATCH_UP_ROUNDS = 32


@dataclass(frozen=True, slots=True)
class _Offer:
    """The options of a choice. losses: expected seconds by depth; seconds: those of a round of the best
    depth."""

    best: int
    losses: dict[int, float]
    seconds: float


class DepthPolicy:
    """Mutable: the scheduler asks it for the depth of each round, and reports each round that was planned or
    read. Depths are 0 to max_depth."""

    def __init__(self, costs: CostTable, max_depth: int) -> None:
        self._costs = costs
        self._max_depth = max_depth
        self._acceptance = Acceptance(max_depth)
        self._saved_seconds = [0.0] * (max_depth + 1)
        self._num_rounds = self._explored_at = 0
        self._tried_at = [0] * (max_depth + 1)
        self._offer: _Offer | None = None

    def record(self, temperature: float, *, is_masked: bool, cap: int) -> Record:
        """Returns the record of a new request. cap: the most drafts that it may have in a round."""
        return self._acceptance.record(Kind.of(temperature, is_masked=is_masked), cap)

    def choose(self, load: RoundLoad, depths: Sequence[int]) -> int:
        """Returns one of the ascending depths. The round counts only after `begin_round`, since it may not be
        planned after all."""
        late = self._costs.catch_up_seconds(load.num_rows)
        undrafted, *drafted = self._costs.seconds(load)
        share = late / _CATCH_UP_ROUNDS
        if load.is_late:
            drafted = [seconds + share for seconds in drafted]
        else:
            undrafted += share
        seconds = [undrafted, *drafted]
        accepted = self._acceptance.expected_accepted()
        rates = [(load.num_rows + accepted[depth]) / seconds[depth] for depth in range(len(seconds))]
        best = max(depths, key=rates.__getitem__)
        losses = {depth: seconds[depth] * (1 - rates[depth] / rates[best]) for depth in depths}
        # A round without drafts makes the drafter late after one of the full depth.
        for depth in depths:
            if (best == 0 and depth > 0 and load.is_late) or (depth == 0 and best == self._max_depth):
                losses[depth] += late
        self._offer = _Offer(best, losses, seconds[best])
        return self._explored(self._offer, load.num_rows)

    def begin_round(self, depth: int) -> None:
        """Counts the planned round whose depth was chosen last."""
        offer, self._offer = self._offer, None
        if offer is None:
            return
        self._num_rounds += 1
        saved, others = self._saved_seconds, [d for d in offer.losses if d != offer.best]
        following = next((d for d in others if d > offer.best), None)
        num_others = len(others) - (following is not None)
        for other in others:
            share = _NEXT_SHARE if other == following else _OTHERS_SHARE / num_others
            most = max(_MOST_SAVED_ROUNDS * offer.seconds, offer.losses[other])
            saved[other] = min(saved[other] + share * offer.seconds, most)
        if depth in others:
            saved[depth] -= offer.losses[depth]
            self._explored_at = self._tried_at[depth] = self._num_rounds

    def catch_up_seconds(self, load: RoundLoad) -> float:
        """Returns how long the drafter takes to catch up before such a round."""
        return self._costs.catch_up_seconds(load.num_rows)

    def undrafted_seconds(self, load: RoundLoad, depth: int, seconds: float) -> float:
        """Returns the expected time without drafts of a round that took this long. An unusual round is
        assumed to be shorter by the same share as usual ones."""
        usual = self._costs.seconds(load)
        return usual[0] if load.is_usual else seconds * usual[0] / usual[depth]

    def end_round(self, load: RoundLoad, depth: int, seconds: float) -> None:
        """Updates the estimates by a round whose records have counted their drafts. seconds: the device time
        of the round."""
        self._acceptance.end_round()
        if load.is_usual:
            self._costs.learn(load, depth, seconds)

    def _explored(self, offer: _Offer, num_rows: int) -> int:
        """Returns the best depth, or another one whose expected loss has been saved up; of several the one
        that was tried longest ago."""
        if self._num_rounds - self._explored_at < min(max(num_rows / 2, _LEAST_PERIOD), _MOST_PERIOD):
            return offer.best
        saved = self._saved_seconds
        due = [d for d, loss in offer.losses.items() if d != offer.best and saved[d] >= loss]
        return min(due, key=self._tried_at.__getitem__, default=offer.best)
