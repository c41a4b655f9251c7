"""Ranks of one model as threads of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch

from headway.engine.layers.group import Group

Result = TypeVar("Result")
SECONDS = 60.0  # after which a rank that is left alone fails


class ThreadGroup:
    """A rank among threads. num_gathers: counts its calls."""

    def __init__(self, rank: int, parts: list[torch.Tensor], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier
        self.num_gathers = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_gathers += 1
        self._parts[self.rank] = x
        self._barrier.wait(SECONDS)
        whole = torch.cat(self._parts, dim=1)
        self._barrier.wait(SECONDS)
        return whole


def run_ranks(size: int, run: Callable[[Group], Result]) -> list[Result]:
    """Returns what each rank returns."""
    parts, barrier = [torch.empty(0)] * size, Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, ThreadGroup(rank, parts, barrier)) for rank in range(size)]
        return [future.result() for future in futures]
