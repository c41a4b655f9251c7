"""What a round leaves, written to where the host reads it (PyTorch twin)."""

from __future__ import annotations

import time

import torch


def publish(
    packed: torch.Tensor,  # [n] int64
    places: torch.Tensor,  # [m, n or more] int64, one of them written
    count: torch.Tensor,  # [1] int64: calls so far; += 1
    *,
    time_index: int,
) -> None:
    """Writes packed to the place whose turn it is, count modulo m, with the time at this index: nanoseconds, as `stamp`."""
    place = places[int(count) % len(places)]
    place[: len(packed)] = packed
    place[time_index] = time.perf_counter_ns()
    count += 1
