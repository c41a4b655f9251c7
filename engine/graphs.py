"""Decode rounds as CUDA graphs: one for each padded number of rows and depth, from one memory pool.

Knows how to capture and which graph to take; what a round does is round.py's. A graph's outcome lies in the
pool's memory until any graph is replayed: copies of it are to be launched before that, on the same stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from headway.engine.round import Outcome

# Beyond these every 64: the rows that a larger graph computes in vain stay few.
_ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48)
ROW_STEP = 64

logger = logging.getLogger(__name__)


class Round(NamedTuple):
    """What one graph is made for. keeps_logits: the outcome has them, in memory that no other graph may use."""

    num_rows: int
    depth: int
    is_adjusted: bool = False
    keeps_logits: bool = False


class RoundGraphs:
    """Mutable: graphs are added by `capture`, and by `run` where one is missing. Used by one thread.

    launch: launches a round over the first rows of the slot table, kernel by kernel.
    """

    def __init__(self, launch: Callable[[Round], Outcome], *, max_rows: int) -> None:
        self._launch = launch
        self._row_counts = row_counts(max_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.Stream(device="cuda")
        self._graphs: dict[Round, tuple[torch.cuda.CUDAGraph, Outcome]] = {}
        self._is_warm: set[Round] = set()
        self._is_too_large: set[Round] = set()

    def capture(self, depths: Iterable[int], progress: Callable[[float], None]) -> None:
        """The plain rounds, the largest first, so that the smaller ones fit into their memory.

        Only while every row of the table is padding: each round is run once before it is captured, which
        compiles its kernels. progress: called with the share that is done.
        """
        started = time.monotonic()
        deepest_first = sorted(depths, reverse=True)
        rounds = [Round(n, depth) for n in reversed(self._row_counts) for depth in deepest_first]
        for done, wanted in enumerate(rounds, start=1):
            self._launch(wanted)
            self._capture(wanted)
            progress(done / len(rounds))
        logger.info("captured %d rounds in %.1f s", len(rounds), time.monotonic() - started)

    def run(self, wanted: Round) -> tuple[Outcome, bool]:
        """(what the round gives for at least so many rows, whether it was replayed).

        One that was never seen is run kernel by kernel, and captured the next time.
        """
        wanted = wanted._replace(num_rows=next(n for n in self._row_counts if n >= wanted.num_rows))
        if wanted not in self._graphs and not self._can_capture(wanted):
            self._is_warm.add(wanted)
            return self._launch(wanted), False
        graph, outcome = self._graphs[wanted]
        graph.replay()
        return outcome, True

    def _can_capture(self, wanted: Round) -> bool:
        """Captures a round that was run before. One that does not fit stays as it is: slower, no worse."""
        if wanted not in self._is_warm or wanted in self._is_too_large:
            return False
        torch.cuda.empty_cache()  # a capture cannot take back what the allocator keeps for other uses
        try:
            self._capture(wanted)
        except torch.OutOfMemoryError:
            logger.warning("%s is too large to be captured; it is launched kernel by kernel", wanted)
            self._is_too_large.add(wanted)
            return False
        return True

    def _capture(self, wanted: Round) -> None:
        """Without torch.cuda.graph, which collects garbage and empties the allocator's cache each time."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outcome = self._launch(wanted)
            finally:
                graph.capture_end()
        self._graphs[wanted] = graph, outcome


def row_counts(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 192, ... and max_rows."""
    steps = range(ROW_STEP, max_rows, ROW_STEP)
    return (*(n for n in (*_ROW_COUNTS, *steps) if n < max_rows), max_rows)
