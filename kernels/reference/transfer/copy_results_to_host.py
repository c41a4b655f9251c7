"""Copies a round's results to memory that the host reads (PyTorch twin)."""

from __future__ import annotations

import time

import torch


def copy_results_to_host(
    packed: torch.Tensor,  # [n] int64; the time at time_index is written
    places: torch.Tensor,  # [m, n + 1 or more] int64, one of them written
    count: torch.Tensor,  # [1] int64: calls so far; += 1
    *,
    time_index: int,
) -> None:
    """Writes count and then packed to entry count % m of the ring. packed[time_index] becomes the time in
    nanoseconds, as in `stamp`."""
    number = int(count)
    packed[time_index] = time.perf_counter_ns()
    place = places[number % len(places)]
    place[0] = number
    place[1 : 1 + len(packed)] = packed
    count += 1
