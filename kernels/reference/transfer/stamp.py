"""The time at which the work launched so far is done (PyTorch twin)."""

from __future__ import annotations

import time

import torch


def stamp(
    out: torch.Tensor,  # [1 or 2] int64, written: equal times
) -> None:
    """Nanoseconds of a clock that only runs on; only differences mean anything."""
    out.fill_(time.perf_counter_ns())
