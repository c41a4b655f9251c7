"""Estimates how long a decode round takes. It is measured at the start for empty rows, and then updated by
the rounds' own times.

    seconds(rows, depth, context, prompts) =
        pace[rows] * (intercept[rows, depth] + context * slope[depth] + prompts * prompt_slope[depth])

Slopes are seconds per token. A device that becomes slower does so at all depths, so that the pace also holds
for depths that were not tried since. Knows numbers only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

# The weight, in rounds, of a measurement at the start, and of a value that was inferred from other sizes.
_MEASURED_WEIGHT, _INFERRED_WEIGHT = 4.0, 0.5
# The factor by which the weight of a round decays with each later round of its size.
_KEPT = 1 - 1 / 64
# The share by which a round that takes longer than its size usually does moves the pace of all depths.
_PACE_SHARE = 0.3
# The weight of all depths together in the slope of each.
_SHARED_WEIGHT = 0.01
# Each draft raises the cost of a cached token by this share: 4 % on an H100 and on an H200 (7B model).
_CONTEXT_SHARE_OF_DRAFT = 0.04
# The time of a round is limited to this many times its estimate, since other processes may have used the
# device.
_MOST_TIMES = 2.0


class RoundLoad(NamedTuple):
    """The work of a round besides its drafts.

    num_rows: the number of live rows. num_context_tokens: the cached tokens of all of them.
    num_prompt_tokens: the prompt tokens in the same pass. is_usual: its time is typical; it is not with
    logits processors, log-probabilities or grammars. is_late: the drafter would have to catch up before it
    drafts.
    """

    num_rows: int
    num_context_tokens: int = 0
    num_prompt_tokens: int = 0
    is_usual: bool = True
    is_late: bool = False


@dataclass(slots=True)
class _Cell:
    """The rounds of one size. Mutable: decayed sums over the rounds, x: context tokens, y: seconds at the
    pace of the start, without prompts.

    base: the seconds for empty rows, which count as `weight` observed rounds. covariance, variance: of x and
    y, and of x, as they enter the slope.
    """

    base: float
    weight: float
    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    covariance: float = 0.0
    variance: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n = self.n * _KEPT + 1
        self.x = self.x * _KEPT + x
        self.y = self.y * _KEPT + y
        self.xx = self.xx * _KEPT + x * x
        self.xy = self.xy * _KEPT + x * y
        n = self.n + self.weight
        self.covariance = self.xy - self.x * (self.y + self.weight * self.base) / n
        self.variance = self.xx - self.x * self.x / n

    def usual(self, slope: float, num_context_tokens: int) -> float:
        """Returns the seconds of a round at the pace of the start."""
        intercept = (self.y + self.weight * self.base - slope * self.x) / (self.n + self.weight)
        return intercept + slope * num_context_tokens


class _Slopes:
    """Seconds per token by depth. Mutable: an unseen depth uses its part of the common slope.

    parts: the expected ratios of the slopes. by_depth: the slopes.
    """

    def __init__(self, parts: Sequence[float], *, first: float = 0.0) -> None:
        """first: the slope before anything was seen."""
        self._parts = parts
        self._covariance, self._variance = [0.0] * len(parts), [0.0] * len(parts)
        self.by_depth = [first * part for part in parts]

    def change(self, depth: int, covariance: float, variance: float, *, kept: float = 1.0) -> None:
        """Adds observations of the depth's slope. kept: the share of the earlier observations that is
        kept."""
        self._covariance[depth] = kept * self._covariance[depth] + covariance
        self._variance[depth] = kept * self._variance[depth] + variance
        columns = list(zip(self._parts, self._covariance, self._variance, strict=True))
        total = sum(part * part * v for part, _, v in columns)
        if total > 0:
            shared = _SHARED_WEIGHT * total
            common = shared * sum(part * c for part, c, _ in columns) / total
            self.by_depth = [max((c + common * part) / (v + shared), 0.0) for part, c, v in columns]


class CostTable:
    """Mutable: the depth policy calls `learn` with each round that was read."""

    def __init__(
        self,
        row_counts: Sequence[int],
        max_depth: int,
        measured: Mapping[tuple[int, int], float],
        catch_ups: Mapping[int, float] | None = None,
    ) -> None:
        """row_counts: ascending sizes to which rounds are padded. measured: the seconds of rounds without
        context by (rows, depth), with all depths for each number of rows. catch_ups: the seconds in which a
        drafter catches up, by rows; None: it never has to. Sizes between are interpolated, larger ones
        extrapolated; more rows and more drafts never take less."""
        assert measured, "no round was measured"
        self._row_counts = tuple(row_counts)
        bases = _completed(self._row_counts, max_depth, measured)
        self._cells = [
            [_Cell(base, _weight((rows, depth), measured)) for depth, base in enumerate(line)]
            for rows, line in zip(self._row_counts, bases, strict=True)
        ]
        self._catch_ups = _rising(self._row_counts, catch_ups or {self._row_counts[0]: 0.0})
        self._paces = [1.0] * len(self._row_counts)
        depths = range(max_depth + 1)
        self._context = _Slopes([1 + _CONTEXT_SHARE_OF_DRAFT * depth for depth in depths])
        self._prompts = _Slopes([1.0] * len(depths), first=_token_seconds(self._row_counts, bases))

    def seconds(self, load: RoundLoad) -> list[float]:
        """Returns the seconds of such a round by depth; more drafts never take less."""
        index = self._index(load.num_rows)
        num_context_tokens, num_prompt_tokens = load.num_context_tokens, load.num_prompt_tokens
        pace, least, found = self._paces[index], 0.0, []
        columns = zip(self._cells[index], self._context.by_depth, self._prompts.by_depth, strict=True)
        for cell, slope, prompt_slope in columns:
            usual = cell.usual(slope, num_context_tokens) + prompt_slope * num_prompt_tokens
            least = max(least, pace * usual)
            found.append(least)
        return found

    def catch_up_seconds(self, num_rows: int) -> float:
        """Returns how long the drafter takes to catch up before a round. The round's time does not include
        it."""
        return self._catch_ups[self._index(num_rows)]

    def learn(self, load: RoundLoad, depth: int, seconds: float) -> None:
        """Updates the estimates by the time of a round."""
        index = self._index(load.num_rows)
        cell, context, num_prompt_tokens = (
            self._cells[index][depth],
            load.num_context_tokens,
            load.num_prompt_tokens,
        )
        seconds /= self._paces[index]
        usual = cell.usual(self._context.by_depth[depth], context)
        if num_prompt_tokens:
            most = _MOST_TIMES * (usual + self._prompts.by_depth[depth] * num_prompt_tokens)
            covariance = num_prompt_tokens * (min(seconds, most) - usual)
            self._prompts.change(depth, covariance, num_prompt_tokens**2, kept=_KEPT)
            return
        if cell.n >= 1:
            # The pace is updated first, so that a cell learns only how its depth differs from others. An
            # unseen cell is left out, since its deviation may be due to context.
            seconds = min(seconds, _MOST_TIMES * usual)
            change = 1 + _PACE_SHARE * (seconds / usual - 1)
            self._paces[index] *= change
            seconds /= change
        covariance, variance = cell.covariance, cell.variance
        cell.add(context, seconds)
        self._context.change(depth, cell.covariance - covariance, cell.variance - variance)

    def _index(self, num_rows: int) -> int:
        return min(bisect_left(self._row_counts, num_rows), len(self._row_counts) - 1)


def _weight(key: tuple[int, int], measured: Mapping[tuple[int, int], float]) -> float:
    return _MEASURED_WEIGHT if key in measured else _INFERRED_WEIGHT


def _completed(
    row_counts: Sequence[int], max_depth: int, measured: Mapping[tuple[int, int], float]
) -> list[list[float]]:
    """Returns the seconds by row count and depth. Times that were measured too long are cut."""
    known, depths = sorted({rows for rows, _ in measured}), range(max_depth + 1)
    lines = [_cut([measured[rows, depth] for depth in depths]) for rows in known]
    columns = [_by_row_count(row_counts, known, _cut([line[depth] for line in lines])) for depth in depths]
    return [list(line) for line in zip(*columns, strict=True)]


def _rising(row_counts: Sequence[int], measured: Mapping[int, float]) -> list[float]:
    """Returns the seconds for each row count. Times that were measured too long are cut. Sizes above the
    measured ones take no more for a row than the largest of these."""
    known = sorted(measured)
    seconds = _cut([measured[rows] for rows in known])
    inferred = _by_row_count(row_counts, known, seconds)
    return [
        min(s, seconds[-1] * max(rows / known[-1], 1.0)) for rows, s in zip(row_counts, inferred, strict=True)
    ]


def _cut(seconds: Sequence[float]) -> list[float]:
    """Returns the times, each limited by those of the larger sizes after it, since noise only adds time."""
    return list(accumulate(reversed(seconds), min))[::-1]


def _by_row_count(row_counts: Sequence[int], known: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Returns the seconds for each row count. known, seconds: the ascending known counts and their
    seconds."""
    return [_at(rows, known, seconds) for rows in row_counts]


def _at(rows: int, known: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns the value on the line through the two points around, or on the nearest such line."""
    if len(known) == 1 or rows <= known[0]:
        return seconds[0]
    right = min(max(bisect_left(known, rows), 1), len(known) - 1)
    share = (rows - known[right - 1]) / (known[right] - known[right - 1])
    return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


def _token_seconds(row_counts: Sequence[int], bases: Sequence[Sequence[float]]) -> float:
    """Returns the seconds of one more token in the largest rounds."""
    if len(row_counts) == 1:
        return 0.0
    depth = len(bases[0]) - 1
    num_tokens = (row_counts[-1] - row_counts[-2]) * (depth + 1)
    return (bases[-1][depth] - bases[-2][depth]) / num_tokens
