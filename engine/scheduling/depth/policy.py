"""Chooses the depth of a round: that of the most expected tokens a second, at times another one to learn what it is worth.

All rows of a round have one depth. A round is padded to rows x (depth + 1) tokens, in which a masked draft costs what a draft costs: to
mask the drafts of some rows would save no time and lose tokens. docs/running.md says what rounds of unequal windows could gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine.scheduling.depth.acceptance import Acceptance, Kind, Record
from headway.engine.scheduling.depth.costs import CostTable, RoundLoad

# The share of the time that rounds of another depth than the best may lose: of the next deeper one, which tells how often the
# first draft is accepted that is not tried otherwise, and of all others together.
_NEXT_SHARE, _OTHERS_SHARE = 0.0035, 0.0015
# At most this much is saved up for each depth, in rounds.
_MOST_SAVED_ROUNDS = 4.0
# Depths that seem about as good as the best are tried once in so many rounds at most, fewer if a round has few rows to learn from: what
# they lose is not known that well. Deep rounds slow those after them down, for a GPU lowers its clock.
_LEAST_ROUNDS_BETWEEN, _LEAST_ROUNDS_PER_ROW = 16, 0.5
# A drafter that has to catch up first is worth it if drafts gain that time in this many rounds.
_CATCH_UP_ROUNDS = 32


class DepthPolicy:
    """Mutable: the scheduler asks it for each round, and tells it of each that was read. Depths: 0 to max_depth."""

    def __init__(self, costs: CostTable, max_depth: int) -> None:
        self._costs = costs
        self._acceptance = Acceptance(max_depth)
        self._saved_seconds = [0.0] * (max_depth + 1)
        self._num_since = [0] * (max_depth + 1)  # rounds since the depth was explored

    def record(self, temperature: float, *, is_masked: bool, cap: int) -> Record:
        """Returns the record of a new request. cap: the most drafts that it may have in a round."""
        return self._acceptance.record(Kind.of(temperature, is_masked=is_masked), cap)

    def choose(self, load: RoundLoad, depths: Sequence[int]) -> int:
        """Returns one of the depths, which ascend."""
        late = self._costs.catch_up_seconds(load.num_rows) if load.is_late else 0.0
        undrafted, *drafted = self._costs.seconds(load)
        seconds = [undrafted, *(s + late / _CATCH_UP_ROUNDS for s in drafted)]
        accepted = self._acceptance.expected_accepted()
        rates = [(load.num_rows + accepted[depth]) / seconds[depth] for depth in range(len(seconds))]
        best = max(depths, key=rates.__getitem__)
        losses = {depth: seconds[depth] * (1 - rates[depth] / rates[best]) for depth in depths}
        if best == 0:
            losses |= {depth: loss + late for depth, loss in losses.items() if depth > 0}
        num_between = min(_LEAST_ROUNDS_BETWEEN, _LEAST_ROUNDS_PER_ROW * load.num_rows)
        return self._explored(best, losses, seconds[best], num_between)

    def catch_up_seconds(self, load: RoundLoad) -> float:
        """Returns how long the drafter takes to catch up before such a round."""
        return self._costs.catch_up_seconds(load.num_rows)

    def undrafted_seconds(self, load: RoundLoad, depth: int, seconds: float) -> float:
        """Returns how long a round that took this long is expected to take without drafts. An unusual one is expected to be shorter
        by the same share as usual ones."""
        usual = self._costs.seconds(load)
        return usual[0] if load.is_usual else seconds * usual[0] / usual[depth]

    def end_round(self, load: RoundLoad, depth: int, seconds: float) -> None:
        """Takes in a round whose rows' records have noted their drafts. seconds: how long the device worked on it."""
        self._acceptance.end_round()
        if load.is_usual:
            self._costs.learn(load, depth, seconds)

    def _explored(self, best: int, losses: dict[int, float], seconds: float, num_between: float) -> int:
        """Returns another depth once the time is saved that it is expected to lose, else the best. losses: seconds by depth,
        which ascend. seconds: of the best depth. num_between: rounds between two of a depth that is not the best."""
        saved, most = self._saved_seconds, _MOST_SAVED_ROUNDS * seconds
        following = next((depth for depth in losses if depth > best), None)
        others = len(losses) - 1 - (following is not None)
        chosen = best
        for depth, loss in losses.items():
            if depth == best:
                continue
            share = _NEXT_SHARE if depth == following else _OTHERS_SHARE / others
            saved[depth] = min(saved[depth] + share * seconds, most)
            self._num_since[depth] += 1
            is_due = self._num_since[depth] >= num_between
            if chosen == best and is_due and saved[depth] >= loss:
                chosen = depth
        self._num_since[chosen] = 0
        if chosen != best:
            saved[chosen] -= losses[chosen]
        return chosen
