"""What the plain suite keeps of a cross product of parameters."""

from collections import Counter
from itertools import product

import pytest
from headway_testing.grids import CASES_PER_VALUE, covering


@pytest.mark.parametrize("sizes", [(5, 5, 2, 2), (6, 4, 2), (40, 1), (3, 4, 7)], ids=str)
def test_every_value_stays_in_some_cases(sizes: tuple[int, ...]) -> None:
    axes = [[(str(axis), str(index)) for index in range(size)] for axis, size in enumerate(sizes)]
    cases = list(product(*axes))
    chosen = covering(cases)
    assert len(set(chosen)) == len(chosen) <= CASES_PER_VALUE * sum(sizes)
    counts = Counter(value for index in chosen for value in cases[index])
    all_counts = Counter(value for case in cases for value in case)
    assert all(counts[value] >= min(n, CASES_PER_VALUE) for value, n in all_counts.items())
