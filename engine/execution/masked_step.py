"""Steps with masked rows, in two halves: the host fills the masks while the first half runs.

The second half is launched whatever happens between the halves, since the rows on the device have advanced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from headway.engine.execution.graphs import GraphCache, GraphMemory
from headway.engine.execution.host_ring import RingSlot
from headway.engine.execution.launcher import StepLauncher
from headway.engine.execution.results import StepHandle
from headway.engine.execution.step import HalfStep, StepOutcome
from headway.engine.execution.step_key import StepKey
from headway.engine.grammar.masks import MaskBuffer

_LOOK_SECONDS = 2e-5
_MAX_WAIT_SECONDS = 60.0


class MaskedStep:
    """Launches both halves of a key, on a GPU as graphs from the second time on. Mutable: keeps the half that
    was begun last."""

    def __init__(self, launcher: StepLauncher, memory: GraphMemory | None) -> None:
        """memory: None if halves are launched kernel by kernel."""
        self._launcher = launcher
        self._half: HalfStep | None = None
        self._is_replayed = False
        self._first: GraphCache[StepKey, HalfStep] | None = None
        self._second: GraphCache[StepKey, StepOutcome] | None = None
        if memory is not None:
            self._first = GraphCache(launcher.begin, memory)
            self._second = GraphCache(self._launch_second, memory)

    def begin(self, key: StepKey) -> None:
        if self._first is None:
            self._half = self._launcher.begin(key)
        else:
            self._half, self._is_replayed = self._first.run(key)

    def finish(self, key: StepKey) -> tuple[StepOutcome, bool]:
        """Returns the outcome, and whether both halves were replayed. The second half may be a graph only if
        the first one was, whose results stay at their addresses."""
        if self._second is None or not self._is_replayed:
            return self._launch_second(key), False
        return self._second.run(key)

    def _launch_second(self, key: StepKey) -> StepOutcome:
        assert self._half is not None, "the step was begun"
        return self._launcher.finish(key, self._half)


class BegunStep:
    """A step whose first half is launched. buffer: takes the masks of its rows."""

    def __init__(
        self,
        finish: Callable[[Mapping[int, int]], StepHandle],
        buffer: MaskBuffer,
        drafts: RingSlot | None,
        num_rows: int,
    ) -> None:
        self._finish = finish
        self._drafts = drafts
        self._num_rows = num_rows
        self.buffer = buffer

    def drafts(self) -> list[list[int]]:
        """Waits for the drafts. Returns them by row of the round; those beyond a row's own limit may have any
        value."""
        if self._drafts is None:
            return [[] for _ in range(self._num_rows)]
        since = time.monotonic()
        while (told := self._drafts.read_early()) is None:
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() - since > _MAX_WAIT_SECONDS:
                torch.accelerator.synchronize()  # raises what went wrong on the device
                raise AssertionError("the drafts did not come")
        depth = (len(told) - 1) // self._num_rows
        return [told[at : at + depth] for at in range(1, len(told), depth)]

    def finish(self, entries: Mapping[int, int]) -> StepHandle:
        """Launches the second half. entries: the entry of the buffer for each masked row."""
        return self._finish(entries)
