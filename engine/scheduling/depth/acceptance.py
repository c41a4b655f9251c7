"""Estimates how often the draft at each position is accepted, by class of requests and by request.

The rates of a class are estimated from all of its rows together: a draft counts at position i only if the
draft before it was accepted, so that a round of depth k says something about the first k positions. A request
is described by its distance from its class.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

# Upper bounds of the temperatures of a class; 0 is greedy.
_TEMPERATURES = (0.0, 0.5, 0.9)
# The assumed rate at which a draft is accepted after an accepted one, before any was seen.
_FIRST_RATE = 0.7
_LEAST_RATE, _MOST_RATE = 0.005, 0.995
# A class remembers at most this many drafts at a position, or those of this many rounds if they are more.
_MOST_DRAFTS, _MOST_ROUNDS = 150, 16
# The share of them that it keeps in a round that does not reach the position, down to this many drafts.
_KEPT_UNSEEN, _LEAST_DRAFTS = 1 - 1 / 32, 16
# The share of the latest round in how far a request lies from its class.
_OWN_SHARE = 1 / 16


class Kind(NamedTuple):
    """The class of a request. Requests of one class have about the same acceptance."""

    temperature_class: int
    is_masked: bool

    @classmethod
    def of(cls, temperature: float, *, is_masked: bool) -> Kind:
        return cls(bisect_left(_TEMPERATURES, temperature), is_masked)


class Population:
    """The rows of one class. Mutable: `Acceptance` and the records of its rows are its only writers.

    rates[i]: the rate at which draft i + 1 is accepted if those before it were. accepted[k]: the average
    number of accepted drafts of a row in a round of depth k. num_rows[i]: the number of rows that may have
    more than i drafts. counts[k][n]: the number of rows with k drafts, n of them accepted, in the round that
    is being read.
    """

    def __init__(self, rates: list[float]) -> None:
        depth = len(rates)
        self.rates = rates
        self.num_rows = [0] * depth
        self.accepted = [0.0] * (depth + 1)
        self.counts = [[0] * (k + 1) for k in range(depth + 1)]
        self._num_known = [float(_LEAST_DRAFTS)] * depth
        self._num_joined = 0
        self._total_advantage = 0.0
        self._log_departed = 0.0
        self._compute_accepted()

    def end_round(self) -> None:
        """Updates the rates by the counts. Positions that the round did not reach shift like the last one
        that it reached."""
        shift = 0.0
        for i, rate in enumerate(self.rates):
            known, lines = self._num_known[i], self.counts[i + 1 :]
            if tried := sum(sum(line[i:]) for line in lines):
                num_accepted = sum(sum(line[i + 1 :]) for line in lines)
                self.rates[i] = _bounded(rate + (num_accepted - tried * rate) / (known + tried))
                self._num_known[i] = min(known + tried, max(_MOST_DRAFTS, _MOST_ROUNDS * tried))
                shift = _logit(self.rates[i]) - _logit(rate)
                if i == 0:
                    self._log_departed *= known / (known + tried)
            else:
                self._num_known[i] = max(known * _KEPT_UNSEEN, _LEAST_DRAFTS)
                if shift:
                    self.rates[i] = _bounded(1 / (1 + math.exp(-_logit(rate) - shift)))
        for line in self.counts:
            line[:] = [0] * len(line)
        self._compute_accepted()

    @property
    def mean_advantage(self) -> float:
        """Returns the mean advantage of the rows, 0 without rows. It need not be 0, since each row is
        estimated by itself while the class changes."""
        return self._total_advantage / self._num_joined if self._num_joined else 0.0

    def change_rows(self, cap: int, advantage: float, change: int) -> None:
        """Adds (1) or removes (-1) a row, which changes the class as it changes the mean of its rows.

        The first row of an empty class finds the rates from before its rows left one after the other, as far
        as the drafts of the remaining rows have not updated them since.
        """
        if change > 0 and not self._num_joined:
            self._change_first_rate(math.exp(-self._log_departed))
            self._log_departed = 0.0
        before, is_last = self._mean_level, self._num_joined + change == 0
        self._num_joined += change
        self._total_advantage = 0.0 if is_last else self._total_advantage + change * advantage
        for i in range(cap):
            self.num_rows[i] += change
        if not is_last:
            self._log_departed += self._change_first_rate(self._mean_level / before)
        self._compute_accepted()

    def rates_of_new(self) -> list[float]:
        """Returns the rates with which the next row begins."""
        rates = list(self.rates)
        if rates and not self._num_joined:
            rates[0] = _bounded(rates[0] * math.exp(-self._log_departed))
        return rates

    @property
    def _mean_level(self) -> float:
        """Returns the mean ratio of the rows' acceptance to that of the class. It is above 0, even if no
        draft is ever accepted."""
        return max(1 + self.mean_advantage, _LEAST_RATE)

    def _change_first_rate(self, times: float) -> float:
        """Multiplies the rate of the first draft. Returns the logarithm of the factor by which it changed."""
        if not self.rates:
            return 0.0
        before = self.rates[0]
        self.rates[0] = _bounded(before * times)
        return math.log(self.rates[0] / before)

    def change_advantage(self, change: float) -> None:
        """Adds a change of the advantage of a row that takes part in rounds."""
        self._total_advantage += change

    def _compute_accepted(self) -> None:
        survival = 1.0
        for i, rate in enumerate(self.rates):
            survival *= rate
            self.accepted[i + 1] = self.accepted[i] + survival


class Record:
    """The acceptance of one request's drafts. Mutable: the scheduler is its only writer.

    advantage: how far the acceptance of its drafts lies above that of its class.
    """

    __slots__ = ("_cap", "_is_new", "_population", "_takes_part", "advantage")

    def __init__(self, population: Population, cap: int) -> None:
        self._population = population
        self._cap = cap
        self._takes_part = False
        self._is_new = True
        self.advantage = 0.0

    def join(self) -> None:
        """Notes that the request takes part in rounds from now on."""
        assert not self._takes_part, "the request takes part already"
        self._takes_part = True
        if self._is_new:
            self._is_new = False
            self.advantage = self._population.mean_advantage
        self._population.change_rows(self._cap, self.advantage, 1)

    def leave(self) -> None:
        """Notes that the request takes part in no more rounds, if it did in any."""
        if self._takes_part:
            self._takes_part = False
            self._population.change_rows(self._cap, self.advantage, -1)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Counts the request's share of a round that is being read."""
        if num_drafted:
            population = self._population
            population.counts[num_drafted][num_accepted] += 1
            own = num_accepted / population.accepted[num_drafted] - 1
            change = _OWN_SHARE * (own - self.advantage)
            self.advantage += change
            if self._takes_part:
                population.change_advantage(change)


class Acceptance:
    """Mutable: owns the classes; called by the depth policy alone."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._populations: dict[Kind, Population] = {}

    def record(self, kind: Kind, cap: int) -> Record:
        """Returns the record of a new request of this class. cap: the most drafts that it may have."""
        if kind not in self._populations:
            self._populations[kind] = Population(self._rates_of_all())
        return Record(self._populations[kind], min(cap, self._max_depth))

    def end_round(self) -> None:
        """Updates the classes by the counts of a round."""
        for population in self._populations.values():
            if population.num_rows[0]:
                population.end_round()

    def expected_accepted(self) -> list[float]:
        """Returns the expected number of accepted drafts of all rows of a round, by its depth."""
        by_depth = [0.0] * (self._max_depth + 1)
        for population in self._populations.values():
            if population.num_rows[0]:
                total, accepted = 0.0, population.accepted
                for i, num_rows in enumerate(population.num_rows):
                    total += num_rows * (accepted[i + 1] - accepted[i])
                    by_depth[i + 1] += total
        return by_depth

    def _rates_of_all(self) -> list[float]:
        """Returns the rates of an unseen class: the mean of the seen ones."""
        lines = [population.rates_of_new() for population in self._populations.values()]
        if not lines:
            return [_FIRST_RATE] * self._max_depth
        return [sum(rates) / len(lines) for rates in zip(*lines, strict=True)]


def _bounded(rate: float) -> float:
    return min(max(rate, _LEAST_RATE), _MOST_RATE)


def _logit(rate: float) -> float:
    return math.log(rate / (1 - rate))
