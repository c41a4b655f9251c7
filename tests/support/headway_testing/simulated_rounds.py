"""Decode rounds simulated from measured times and drawn acceptance, for tests of the depth policy.

The next round is planned before the last one is read, as the engine's loop does it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from headway.engine.scheduling.depth.acceptance import Record
from headway.engine.scheduling.depth.costs import CostTable, RoundLoad
from headway.engine.scheduling.depth.policy import DepthPolicy
from headway.engine.scheduling.plan import MAX_PENDING

Rates = tuple[float, float, float]  # unconditional, by position
HIGH, MEDIUM, LOW = (0.9, 0.8, 0.7), (0.7, 0.5, 0.35), (0.3, 0.1, 0.03)
PROFILES: dict[str, Rates] = {"high": HIGH, "medium": MEDIUM, "low": LOW}
MAX_DEPTH = 3
# Milliseconds of a round by (context tokens of a row, rows) and depth: MiMo-7B's shape in bfloat16, the
# host's part included.
H200 = {
    (128, 1): (3.60, 3.80, 3.98, 4.17), (128, 8): (3.68, 4.03, 4.33, 4.57), (128, 32): (4.07, 4.62, 5.60, 5.89),
    (128, 64): (4.53, 5.81, 7.16, 8.37), (128, 128): (6.08, 8.47, 11.45, 14.35), (128, 256): (9.57, 15.02, 20.61, 27.67),
    (8192, 1): (4.04, 4.28, 4.48, 4.71), (8192, 8): (5.86, 6.30, 6.71, 7.03), (8192, 32): (13.51, 14.36, 15.82, 16.49),
    (8192, 64): (21.40, 23.57, 25.66, 26.97),
}  # fmt: skip
H100 = {
    (128, 1): (5.00, 5.29, 5.53, 5.80), (128, 8): (5.13, 5.56, 5.88, 6.18), (128, 32): (5.58, 6.14, 7.16, 7.58),
    (128, 64): (6.13, 7.35, 8.64, 9.55), (128, 128): (7.65, 9.65, 12.33, 15.10),
    (8192, 1): (5.50, 5.83, 6.09, 6.36), (8192, 8): (8.29, 8.84, 9.29, 9.72), (8192, 32): (18.70, 19.82, 21.59, 22.41),
}  # fmt: skip
CARDS: dict[str, Mapping[tuple[int, int], Sequence[float]]] = {"H200": H200, "H100": H100}
ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def measured_at_start(
    card: Mapping[tuple[int, int], Sequence[float]], *, error: float = 0.0, seed: int = 0
) -> dict[tuple[int, int], float]:
    """Returns seconds of rounds without context by (rows, depth): those of 128 tokens a row, each up to
    `error` off."""
    chance = random.Random(seed)
    return {
        (rows, depth): milliseconds / 1e3 * (1 + chance.uniform(-error, error))
        for (context, rows), line in card.items()
        for depth, milliseconds in enumerate(line)
        if context == 128
    }


def new_policy(
    card: Mapping[tuple[int, int], Sequence[float]],
    *,
    error: float = 0.0,
    seed: int = 0,
    catch_up_milliseconds: float = 0.0,
) -> DepthPolicy:
    """Returns a policy as a server has it after its start on that card."""
    measured = measured_at_start(card, error=error, seed=seed)
    catch_ups = {ROW_COUNTS[0]: catch_up_milliseconds / 1e3}
    return DepthPolicy(CostTable(ROW_COUNTS, MAX_DEPTH, measured, catch_ups), MAX_DEPTH)


def tokens_per_second(milliseconds: Sequence[float], rows: Sequence[Rates], depth: int) -> float:
    """Returns the rate of a fixed depth."""
    return sum(1 + sum(rates[:depth]) for rates in rows) / milliseconds[depth] * 1e3


def best_fixed(milliseconds: Sequence[float], rows: Sequence[Rates]) -> float:
    return max(tokens_per_second(milliseconds, rows, depth) for depth in range(MAX_DEPTH + 1))


def best_ragged(milliseconds: Sequence[float], halves: tuple[Rates, Rates], num_rows: int) -> float:
    """Returns the most tokens a second if both halves of the rows had depths of their own and each row paid
    for its own tokens alone. It is an upper bound: a row pays its share of a round of its depth, or all rows
    pay for a round of the mean depth, whichever is less."""
    found = []
    for depths in product(range(MAX_DEPTH + 1), repeat=2):
        tokens = (
            sum(1 + sum(rates[:depth]) for rates, depth in zip(halves, depths, strict=True)) * num_rows / 2
        )
        below, is_between = divmod(sum(depths), 2)
        of_mean_depth = (milliseconds[below] + milliseconds[below + is_between]) / 2
        of_shares = sum(milliseconds[depth] for depth in depths) / 2
        found.append(tokens / min(of_mean_depth, of_shares) * 1e3)
    return max(found)


@dataclass
class SimulatedRounds:
    """Rows that all decode, each replaced by a new request of its kind after `length` tokens.

    ends_together: all of them are replaced with the first one. catch_up_milliseconds: before a round with
    drafts once more pairs wait for the drafter than a round of MAX_DEPTH leaves, and before any round once
    MAX_PENDING do. tokens, seconds: so far; the tokens are those expected of the chosen depths, so that luck
    does not count. by_depth: rounds.
    """

    policy: DepthPolicy
    milliseconds: Sequence[float]
    context: int
    rows: list[Rates]
    seed: int = 0
    noise: float = 0.01  # standard deviation of a round's time
    length: int = 256
    depths: Sequence[int] = range(MAX_DEPTH + 1)
    temperature: Callable[[int], float] = lambda row: 0.0
    ends_together: bool = False
    catch_up_milliseconds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    by_depth: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._records = [self._new_record(row) for row in range(len(self.rows))]
        least = self.length if self.ends_together else 1
        self._left = [self._random.randint(least, self.length) for _ in self.rows]
        self._num_pending = 1
        self._unread: tuple[int, float] | None = None

    def run(self, seconds: float) -> float:
        """Runs rounds for that many seconds; returns the tokens a second."""
        began, tokens = self.seconds, self.tokens
        while self.seconds < began + seconds:
            self.step()
        return (self.tokens - tokens) / (self.seconds - began)

    def step(self) -> int:
        """Plans a round, then reads the one before. Returns the depth that was planned."""
        is_late = self._num_pending > MAX_DEPTH + 1
        load = RoundLoad(len(self.rows), self.context * len(self.rows), is_late=is_late)
        depth = self.policy.choose(load, self.depths)
        duration = self.milliseconds[depth] / 1e3 * self._random.gauss(1, self.noise)
        if self._unread is not None:
            self._read(load, *self._unread)
        self._unread = depth, duration
        self.policy.begin_round(depth)
        self.seconds += duration
        if self._num_pending >= MAX_PENDING or (is_late and depth > 0):
            self.seconds += self.catch_up_milliseconds / 1e3
            self._num_pending = 1
        self._num_pending = depth + 1 if depth > 0 else self._num_pending + 1
        self.tokens += sum(1 + sum(rates[:depth]) for rates in self.rows)
        self.by_depth[depth] += 1
        return depth

    def _read(self, load: RoundLoad, depth: int, seconds: float) -> None:
        for row, rates in enumerate(self.rows):
            drawn, accepted = self._random.random(), 0
            while accepted < depth and drawn < rates[accepted]:
                accepted += 1
            self._records[row].note(depth, accepted)
            self._left[row] -= accepted + 1
        self.policy.end_round(load, depth, seconds)
        ended = [row for row, left in enumerate(self._left) if left <= 0]
        if ended and self.ends_together:
            ended = list(range(len(self.rows)))
        for row in ended:
            self._records[row].leave()
        for row in ended:
            self._records[row] = self._new_record(row)
            self._left[row] = self.length

    def _new_record(self, row: int) -> Record:
        record = self.policy.record(self.temperature(row), is_masked=False, cap=MAX_DEPTH)
        record.join()
        return record
