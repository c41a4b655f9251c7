"""The plain suite runs a part of each large cross product of parameters; `make test-long` runs the whole
product.

Triton's interpreter is many times as slow as a twin, so that it gets a smaller part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, groupby
from typing import NamedTuple

import pytest

Value = tuple[str, str]  # a parameter and its value as text


class Part(NamedTuple):
    """most_whole: a product of this many cases or fewer runs whole. cases_per_value: of every value of each
    parameter."""

    most_whole: int
    cases_per_value: int


TWINS = Part(most_whole=12, cases_per_value=3)
INTERPRETED = Part(most_whole=2, cases_per_value=1)


def covering(cases: list[tuple[Value, ...]], cases_per_value: int) -> list[int]:
    """Returns indices of cases in which every value occurs cases_per_value times, or as often as in all
    cases.

    The choice is greedy: the next case has the most values that are still wanted; among equals, the most
    pairs of values that no chosen case has; among equals, the first one.
    """
    wanted = {value: min(n, cases_per_value) for value, n in Counter(v for c in cases for v in c).items()}
    pairs_of = [set(combinations(case, 2)) for case in cases]
    pairs: set[tuple[Value, Value]] = set()
    remaining, chosen = list(range(len(cases))), list[int]()

    def gain(index: int) -> tuple[int, int]:
        return sum(wanted[v] > 0 for v in cases[index]), len(pairs_of[index] - pairs)

    while any(n > 0 for n in wanted.values()):
        best = max(remaining, key=gain)
        remaining.remove(best)
        chosen.append(best)
        for value in cases[best]:
            wanted[value] -= 1
        pairs |= pairs_of[best]
    return chosen


def thin_products(items: Iterable[pytest.Item], part: Part) -> None:
    """Marks as `long` the cases of large cross products that the plain suite can spare.

    Cases for a GPU stay as they are, and so do those that are marked long by name.
    """
    crossed = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and not (item.get_closest_marker("gpu") or item.get_closest_marker("long"))
    ]
    for _, group in groupby(crossed, key=lambda item: (item.path, item.originalname)):
        cases = list(group)
        is_product = len(list(cases[0].iter_markers("parametrize"))) > 1
        if not is_product or len(cases) <= part.most_whole:
            continue
        values = [tuple((k, repr(v)) for k, v in case.callspec.params.items()) for case in cases]
        kept = covering(values, part.cases_per_value)
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("long")
