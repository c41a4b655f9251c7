"""Measures one cell of the grid: tokens a second at the depth that the policy chooses, and at every fixed
one.

The rows of a measurement start from the same prompts each time, so that their context stays what it was;
rounds are timed while all rows decode. Two policies take turns: the one that chooses learns only from its own
rounds, as in a server.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from bench_depth.profiles import (
    ALTERNATED,
    ALTERNATING,
    Spell,
    expected_tokens,
    rates_of,
)
from bench_depth.settings import Settings
from headway.engine.bench.measure import (
    NUM_SETTLING_ROUNDS,
    NUM_WARM_ROUNDS,
    Driver,
    unread_tokens,
)
from headway.engine.build import Engine, measured_policy

LEAST_ROUNDS = 16  # of each measurement


@dataclass(slots=True)
class Timed:
    """Rounds of one spell. Mutable: grows while they are measured. rounds: by depth."""

    rates: tuple[float, ...]
    seconds: float
    tokens: int
    rounds: Counter[int]


@dataclass(frozen=True, slots=True)
class Speed:
    """tokens_per_second: the median of all_tokens_per_second; expected_tokens_per_second: the same if the
    drafts of each round had been accepted exactly as often as set. milliseconds: of a round, on average."""

    tokens_per_second: float
    all_tokens_per_second: list[float]
    expected_tokens_per_second: float
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """auto: the speed where the policy chooses; fixed: by depth. shares: of the rounds where it chooses, by
    depth. over_best, over_depth_0: auto over the best of fixed, and over depth 0; expected_...: the same of
    expected speeds (see Speed)."""

    streams: int
    input_len: int
    profile: str
    shares: list[float]
    auto: Speed
    fixed: list[Speed]
    mean_depth: float
    best_depth: int
    over_best: float
    over_depth_0: float
    expected_over_best: float
    expected_over_depth_0: float

    @classmethod
    def of(
        cls, streams: int, input_len: int, profile: str, shares: list[float], auto: Speed, fixed: list[Speed]
    ) -> Cell:
        speeds = [speed.tokens_per_second for speed in fixed]
        ratios = [auto.tokens_per_second / speed for speed in speeds]
        expected = [auto.expected_tokens_per_second / speed.expected_tokens_per_second for speed in fixed]
        return cls(
            streams, input_len, profile, shares, auto, fixed,
            mean_depth=sum(depth * share for depth, share in enumerate(shares)),
            best_depth=speeds.index(max(speeds)),
            over_best=min(ratios), over_depth_0=ratios[0],
            expected_over_best=min(expected), expected_over_depth_0=expected[0],
        )  # fmt: skip

    @property
    def name(self) -> str:
        return f"{self.streams} x {self.input_len:,}, {self.profile}"


class CellMeter:
    """Mutable: owns both policies and the rates of acceptance; every measurement starts and ends with an idle
    engine."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        synthetic = engine.runner.launcher.context.synthetic
        assert synthetic is not None, "the engine has no synthetic acceptance"
        self._driver = Driver(engine)
        self._scheduler = engine.scheduler
        self._settings = settings
        self._synthetic = synthetic
        self._vocab_size = engine.info.vocab_size
        self._choosing = measured_policy(engine)
        self._listening = copy.deepcopy(self._choosing)
        self._depths = range(engine.info.depth + 1)

    def can_hold(self, streams: int, input_len: int) -> bool:
        """Returns whether all rows of such cells fit into the engine at once."""
        output_len = self._settings.output_len + unread_tokens(self._depths[-1])
        return self._driver.can_hold(batch=streams, input_len=input_len, output_len=output_len)

    def warm_up(self, streams: int, input_len: int) -> None:
        """Computes the prompts, and runs rounds of every depth, so that their kernels are compiled and their
        graphs captured."""
        prompts = self._prompts(streams, input_len)
        for depth in self._depths:
            self._set(depth)
            with closing(self._driver.rounds(prompts, output_len=self._settings.output_len)) as rounds:
                for _ in range(NUM_WARM_ROUNDS):
                    next(rounds)

    def measure(self, streams: int, input_len: int, profile: str) -> Cell:
        """Measures all settings in turn, after the policy has seen the profile for a while."""
        prompts, settings, is_switching = (
            self._prompts(streams, input_len),
            self._settings,
            profile == ALTERNATING,
        )
        names = ALTERNATED if is_switching else (profile,)
        all_rates = [rates_of(name, self._depths[-1]) for name in names]
        own_seconds = settings.switch_seconds if is_switching else settings.seconds
        choices: list[int | None] = [None, *self._depths]
        runs: dict[int | None, list[list[Timed]]] = {choice: [] for choice in choices}
        self._run(prompts, None, [Spell(all_rates[-1], settings.warm_up_seconds)])
        for number in range(settings.num_periods if is_switching else settings.num_runs):
            first = number % len(choices)
            for choice in choices[first:] + choices[:first]:
                # A fixed depth does not learn, so that short spells of it tell as much as long ones.
                seconds = own_seconds if choice is None else settings.seconds
                runs[choice].append(
                    self._run(prompts, choice, [Spell(rates, seconds) for rates in all_rates])
                )
        chosen = sum((spell.rounds for run in runs[None] for spell in run), Counter[int]())
        return Cell.of(
            streams,
            input_len,
            profile,
            [chosen[depth] / chosen.total() for depth in self._depths],
            _speed(runs[None], streams),
            [_speed(runs[depth], streams) for depth in self._depths],
        )

    def _set(self, choice: int | None) -> None:
        self._scheduler.set_depth_policy(self._choosing if choice is None else self._listening)
        self._scheduler.fix_depth(choice)

    def _run(self, prompts: Sequence[list[int]], choice: int | None, spells: Sequence[Spell]) -> list[Timed]:
        self._set(choice)
        return [self._spell(prompts, spell) for spell in spells]

    def _spell(self, prompts: Sequence[list[int]], spell: Spell) -> Timed:
        timed = Timed(spell.rates, 0.0, 0, Counter())
        # The first requests of a spell have lived with the rates of the one before.
        num_before = max(NUM_SETTLING_ROUNDS, self._settings.output_len // (2 * len(self._depths)))
        while not _is_enough(timed, spell):
            self._add_rounds(prompts, spell, timed, num_before)
            num_before = NUM_SETTLING_ROUNDS
        return timed

    def _add_rounds(self, prompts: Sequence[list[int]], spell: Spell, timed: Timed, num_before: int) -> None:
        """Adds rounds until there are enough, or some row has all its tokens. num_before: rounds before the
        rates change."""
        with closing(self._driver.rounds(prompts, output_len=self._settings.output_len)) as rounds:
            settled = [next(rounds) for _ in range(num_before)]
            self._synthetic.change_rates(spell.rates)
            before = settled[-1].seconds
            for one in rounds:
                timed.seconds += one.seconds - before
                timed.tokens += one.tokens
                timed.rounds[one.depth] += 1
                before = one.seconds
                if _is_enough(timed, spell):
                    return

    def _prompts(self, streams: int, input_len: int) -> list[list[int]]:
        """The same ones each time: the prefix cache has them."""
        vocabulary = range(self._vocab_size)
        return [
            random.Random(f"{input_len}-{row}").choices(vocabulary, k=input_len) for row in range(streams)
        ]


def _is_enough(timed: Timed, spell: Spell) -> bool:
    return timed.seconds >= spell.seconds and timed.rounds.total() >= LEAST_ROUNDS


def _speed(runs: Sequence[Sequence[Timed]], streams: int) -> Speed:
    """runs: of spells, which count equally, however long they took."""
    rates = [statistics.mean(spell.tokens / spell.seconds for spell in run) for run in runs]
    expected = [statistics.mean(_expected_rate(spell, streams) for spell in run) for run in runs]
    seconds = sum(spell.seconds for run in runs for spell in run)
    num_rounds = sum(spell.rounds.total() for run in runs for spell in run)
    return Speed(statistics.median(rates), rates, statistics.median(expected), 1e3 * seconds / num_rounds)


def _expected_rate(spell: Timed, streams: int) -> float:
    tokens = sum(count * expected_tokens(spell.rates, depth) for depth, count in spell.rounds.items())
    return streams * tokens / spell.seconds
