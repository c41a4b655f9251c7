"""Chooses the depth of a round: that of the most expected tokens a second, at times another one to learn what
it is worth.

All rows of a round have one depth. A round is padded to rows x (depth + 1) tokens, in which a masked draft
costs what a draft costs: to mask the drafts of some rows would save no time and lose tokens. docs/design.md
says what rounds of unequal windows could gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.engine.scheduling.depth.acceptance import Acceptance, Kind, Record
from headway.engine.scheduling.depth.costs import CostTable, RoundLoad

# The share of the time that rounds of another depth than the best may lose: of the next deeper one, which
# tells how often the first draft is accepted that is not tried otherwise, and of all others together.
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
    """Mutable: the scheduler asks it for each round, and tells it of each that is planned or was read.
    Depths: 0 to max_depth."""

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
        """Returns one of the depths, which ascend. The round may come to nothing: see `begin_round`."""
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
        """Counts the round for which a depth was chosen last, once it is planned."""
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
        """Returns how long a round that took this long is expected to take without drafts. An unusual one is
        expected to be shorter by the same share as usual ones."""
        usual = self._costs.seconds(load)
        return usual[0] if load.is_usual else seconds * usual[0] / usual[depth]

    def end_round(self, load: RoundLoad, depth: int, seconds: float) -> None:
        """Takes in a round whose rows' records have noted their drafts. seconds: how long the device worked
        on it."""
        self._acceptance.end_round()
        if load.is_usual:
            self._costs.learn(load, depth, seconds)

    def _explored(self, offer: _Offer, num_rows: int) -> int:
        """Returns another depth once the time is saved that it is expected to lose, of several the one that
        was tried longest ago, else the best."""
        if self._num_rounds - self._explored_at < min(max(num_rows / 2, _LEAST_PERIOD), _MOST_PERIOD):
            return offer.best
        saved = self._saved_seconds
        due = [d for d, loss in offer.losses.items() if d != offer.best and saved[d] >= loss]
        return min(due, key=self._tried_at.__getitem__, default=offer.best)
