"""Measures decode rounds before the first request: all rows are padding, and their KV cache is empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

# Each size is run this many times. The shortest time counts, since other work only makes a round longer.
_NUM_RUNS = 2
# With a time limit, sizes are measured until this much time has passed, but at least two of them. Every third
# number of rows comes first, since two close sizes tell little about the others. A slow device measures the
# two smallest.
CPU_SECONDS = 0.25
_LEAST_SIZES, _STRIDE = 2, 3


def measured_rounds(
    run: Callable[[int, int], float],
    row_counts: Sequence[int],
    depths: Iterable[int],
    *,
    limit_seconds: float | None,
) -> dict[tuple[int, int], float]:
    """Returns seconds by (rows, depth), with all depths for each number of rows.

    run: runs a round of these rows and drafts, and returns its seconds. limit_seconds: None to measure all
    sizes.
    """
    depths, began = tuple(depths), time.monotonic()
    found: dict[tuple[int, int], float] = {}
    spread = row_counts[::_STRIDE]
    for count, rows in enumerate([*spread, *(n for n in row_counts if n not in spread)]):
        is_late = limit_seconds is not None and time.monotonic() - began > limit_seconds
        if is_late and count >= _LEAST_SIZES:
            break
        size = row_counts[count] if is_late else rows
        for depth in depths:
            found[size, depth] = min(run(size, depth) for _ in range(_NUM_RUNS))
    return found
