"""Draws the combinations under which requests run, each of them equally often, and groups what can run at the
same time.

Knows numbers only: neither the engine nor a text.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple


class Combination(NamedTuple):
    """The conditions that may differ between two runs of one request, and its temperature.

    company: requests that run at the same time, 1 for a request alone. chunk: prompt tokens of a step; None:
    the engine's own policy. is_warm: the prefix cache has been filled with the beginning of the prompt.
    """

    depth: int
    company: int
    chunk: int | None
    is_warm: bool
    is_preempted: bool
    is_greedy: bool

    def describe(self) -> str:
        return ", ".join(
            (
                f"depth {self.depth}",
                "alone" if self.company == 1 else f"{self.company} at once",
                "own chunks" if self.chunk is None else f"chunks of {self.chunk}",
                "warm cache" if self.is_warm else "cold cache",
                "preempted" if self.is_preempted else "not preempted",
                "greedy" if self.is_greedy else "sampled",
            )
        )


class Setting(NamedTuple):
    """The part of a combination that all requests of a group share."""

    depth: int
    company: int
    chunk: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a text under a combination. index: the index of the trial; text: that of the text."""

    index: int
    text: int
    combination: Combination


@dataclass(frozen=True, slots=True)
class Group:
    """Trials that run at the same time, with further requests that complete the company.

    is_scored: the trials return log-probabilities, and the others are adjusted, scored and masked. Otherwise
    no request of the group is any of these, so that prompts may share the pass of a round. is_spread:
    requests arrive over many steps.
    """

    setting: Setting
    trials: tuple[Trial, ...]
    is_scored: bool
    is_spread: bool


def all_combinations(
    depths: Iterable[int], companies: Iterable[int], chunks: Iterable[int | None]
) -> list[Combination]:
    either = (False, True)
    return [Combination(*values) for values in product(depths, companies, chunks, either, either, either)]


def draw(count: int, combinations: Sequence[Combination], chance: random.Random) -> list[Combination]:
    """Returns `count` combinations in random order, of which each occurs as often as any other, or once
    more."""
    drawn: list[Combination] = []
    while len(drawn) < count:
        drawn += chance.sample(combinations, len(combinations))
    return drawn[:count]


def make_trials(
    drawn: Sequence[Combination], greedy_texts: Sequence[int], sampled_texts: Sequence[int]
) -> list[Trial]:
    """Gives each combination a text of its temperature, all texts in turn."""
    num_taken = {True: 0, False: 0}
    trials: list[Trial] = []
    for index, combination in enumerate(drawn):
        texts = greedy_texts if combination.is_greedy else sampled_texts
        trials.append(Trial(index, texts[num_taken[combination.is_greedy] % len(texts)], combination))
        num_taken[combination.is_greedy] += 1
    return trials


def make_groups(trials: Sequence[Trial], chance: random.Random) -> list[Group]:
    """Returns groups in random order. Where a setting has two trials in company or more it has a group that
    is scored and one that is not; a request alone is always scored."""
    by_setting: dict[Setting, list[Trial]] = defaultdict(list)
    for trial in trials:
        combination = trial.combination
        by_setting[Setting(combination.depth, combination.company, combination.chunk)].append(trial)
    groups: list[Group] = []
    for setting, own in by_setting.items():
        if setting.company == 1:
            groups += [Group(setting, (trial,), True, False) for trial in own]
            continue
        chance.shuffle(own)
        count = max(-(-len(own) // setting.company), min(2, len(own)))
        first = chance.randrange(2)
        for number in range(count):
            # is_spread alternates with every second group, so that all four kinds of groups occur.
            is_spread = (first + number + number // 2) % 2 == 0
            groups.append(Group(setting, tuple(own[number::count]), (first + number) % 2 == 0, is_spread))
    chance.shuffle(groups)
    return groups
