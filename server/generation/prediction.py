"""Measures how much of a predicted output the output uses, for `usage`."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

# The numbers of last tokens by which the position is found again after the output has left the prediction,
# the most specific first.
_SIZES = (16, 8, 4, 2, 1)


class PredictionUse:
    """Follows an output through its prediction, whatever was drafted.

    A predicted token is accepted if the output has it where it is expected: after the preceding predicted
    token, and first at the beginning. Otherwise the position is searched by the last tokens; of several
    matches the one nearest to the position in the output counts. Mutable: takes the output's tokens in order.
    """

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = predicted
        self._is_accepted = bytearray(len(predicted))
        self._output: list[int] = []
        self._next = 0  # the index of the expected token; at the end of the prediction none is expected
        self._ends: dict[tuple[int, ...], list[int]] | None = None
        self.num_accepted = 0
        self.num_rejected = 0

    def take(self, token_ids: Iterable[int]) -> int:
        """Returns how many predicted tokens these tokens accept."""
        before = self.num_accepted
        for token_id in token_ids:
            self._output.append(token_id)
            if self._next < len(self._predicted) and self._predicted[self._next] == token_id:
                self.num_accepted += not self._is_accepted[self._next]
                self._is_accepted[self._next] = 1
                self._next += 1
            else:
                self._next = self._place_after()
        return self.num_accepted - before

    def finish(self) -> int:
        """Returns how many predicted tokens the whole output has not accepted."""
        self.num_rejected = len(self._predicted) - self.num_accepted
        return self.num_rejected

    def _place_after(self) -> int:
        """Returns the index after the last tokens in the prediction; its length if they are not in it."""
        if self._ends is None:
            self._ends = _ends(self._predicted)
        reached = len(self._output) - 1
        for size in _SIZES:
            places = self._ends.get(tuple(self._output[-size:]), ()) if size <= reached + 1 else ()
            if places:
                i = bisect_left(places, reached)
                return 1 + min(places[max(0, i - 1) : i + 1], key=lambda place: abs(place - reached))
        return len(self._predicted)


def _ends(tokens: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """Returns the indices at which each run of tokens ends, in order."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for size in _SIZES:
        for end in range(size, len(tokens) + 1):
            found[tuple(tokens[end - size : end])].append(end - 1)
    return dict(found)
