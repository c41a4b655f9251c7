"""The plain suite runs a part of each large cross product of parameters; `make test-long` runs the whole product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, groupby

import pytest

FEW = 12  # A product of this many cases or fewer runs whole.
CASES_PER_VALUE = 3

Value = tuple[str, str]  # a parameter and its value as text


def covering(cases: list[tuple[Value, ...]]) -> list[int]:
    """Returns indices of cases in which every value occurs CASES_PER_VALUE times, or as often as in all cases.

    The choice is greedy: the next case has the most values that are still wanted; among equals, the most pairs of values
    that no chosen case has; among equals, the first one.
    """
    wanted = {value: min(n, CASES_PER_VALUE) for value, n in Counter(v for c in cases for v in c).items()}
    pairs: set[tuple[Value, Value]] = set()
    remaining, chosen = list(range(len(cases))), list[int]()

    def gain(index: int) -> tuple[int, int]:
        case = cases[index]
        return sum(wanted[v] > 0 for v in case), sum(p not in pairs for p in combinations(case, 2))

    while any(n > 0 for n in wanted.values()):
        best = max(remaining, key=gain)
        remaining.remove(best)
        chosen.append(best)
        for value in cases[best]:
            wanted[value] -= 1
        pairs.update(combinations(cases[best], 2))
    return chosen


def thin_products(items: Iterable[pytest.Item]) -> None:
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
        if not is_product or len(cases) <= FEW:
            continue
        kept = covering([tuple((k, repr(v)) for k, v in case.callspec.params.items()) for case in cases])
        for index, case in enumerate(cases):
            if index not in kept:
                case.add_marker("long")
