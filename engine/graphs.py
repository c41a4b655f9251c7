"""Decode rounds as CUDA graphs: one for each padded number of rows and depth, from one memory pool.

Knows how to capture and which graph to take; what a round does is round.py's. A graph's outcome lies in the
pool's memory until any graph is replayed: copies of it are to be launched before that, on the same stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch

from headway.engine.round import Outcome

# Beyond these every 64: the rows that a larger graph computes in vain stay few.
_ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48)
_ROW_STEP = 64

logger = logging.getLogger(__name__)


class RunRound(Protocol):
    """Launches a round over the first rows of the slot table, kernel by kernel."""

    def __call__(self, num_rows: int, depth: int, *, is_adjusted: bool) -> Outcome: ...


class Round(NamedTuple):
    """What one graph is made for."""

    num_rows: int
    depth: int
    is_adjusted: bool


class RoundGraphs:
    """Mutable: graphs are added by `capture`, and by `run` where one is missing. Used by one thread."""

    def __init__(self, run_round: RunRound, *, max_rows: int) -> None:
        self._run_round = run_round
        self._row_counts = row_counts(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.Stream(device="cuda")
        self._graphs: dict[Round, tuple[torch.cuda.CUDAGraph, Outcome]] = {}
        self._is_warm: set[Round] = set()
        self._num_replays = 0

    @property
    def row_counts(self) -> tuple[int, ...]:
        return self._row_counts

    def capture(self, depths: Iterable[int], progress: Callable[[float], None]) -> None:
        """The rounds without adjustments, the largest first, so that the smaller ones fit into their memory.

        Only while every row of the table is padding: each round is run once before it is captured, which
        compiles its kernels. progress: called with the share that is done.
        """
        started = time.monotonic()
        rounds = [
            Round(n, depth, False) for n in reversed(self._row_counts) for depth in sorted(depths)[::-1]
        ]
        for done, wanted in enumerate(rounds, start=1):
            self._run_round(wanted.num_rows, wanted.depth, is_adjusted=wanted.is_adjusted)
            self._capture(wanted)
            progress(done / len(rounds))
        logger.info("captured %d rounds in %.1f s", len(rounds), time.monotonic() - started)

    def run(self, num_rows: int, depth: int, *, is_adjusted: bool) -> Outcome:
        """Replays the round for at least that many rows. One that was never seen is run kernel by kernel,
        captured the next time."""
        wanted = Round(next(n for n in self._row_counts if n >= num_rows), depth, is_adjusted)
        if wanted not in self._graphs and wanted not in self._is_warm:
            self._is_warm.add(wanted)
            return self._run_round(wanted.num_rows, depth, is_adjusted=is_adjusted)
        if wanted not in self._graphs:
            self._capture(wanted)
        graph, outcome = self._graphs[wanted]
        graph.replay()
        self._num_replays += 1
        return outcome

    def drain_replays(self) -> int:
        """How many rounds were replayed since the last call."""
        num_replays, self._num_replays = self._num_replays, 0
        return num_replays

    def _capture(self, wanted: Round) -> None:
        """Without torch.cuda.graph, which collects garbage and empties the allocator's cache each time."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outcome = self._run_round(wanted.num_rows, wanted.depth, is_adjusted=wanted.is_adjusted)
            finally:
                graph.capture_end()
        self._graphs[wanted] = graph, outcome


def row_counts(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192, ... and max_rows."""
    steps = range(_ROW_STEP, max_rows, _ROW_STEP)
    return (*(n for n in (*_ROW_COUNTS, *steps) if n < max_rows), max_rows)
