"""What the plain suite keeps of a cross product of parameters."""

from collections import Counter
from itertools import product

import pytest
from headway_testing.grids import INTERPRETED, TWINS, Part, covering


@pytest.mark.parametrize("part", [TWINS, INTERPRETED], ids=["twins", "interpreted"])
@pytest.mark.parametrize("sizes", [(5, 5, 2, 2), (6, 4, 2), (40, 1), (3, 4, 7)], ids=str)
def test_every_value_stays_in_some_cases(sizes: tuple[int, ...], part: Part) -> None:
    axes = [[(str(axis), str(index)) for index in range(size)] for axis, size in enumerate(sizes)]
    cases = list(product(*axes))
    chosen = covering(cases, part.cases_per_value)
    assert len(set(chosen)) == len(chosen) <= part.cases_per_value * sum(sizes)
    counts = Counter(value for index in chosen for value in cases[index])
    all_counts = Counter(value for case in cases for value in case)
    assert all(counts[value] >= min(n, part.cases_per_value) for value, n in all_counts.items())
