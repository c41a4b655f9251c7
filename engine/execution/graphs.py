"""A cache of CUDA graphs that share one memory pool.

The outcome of a graph stays in the pool's memory until any graph is replayed: it must be copied before that,
on the same stream. No graph may have branches: if one has, an H200 starts each kernel of every graph some 0.3
us later.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from headway.engine.state.memory import available_bytes, bytes_taken_by, format_bytes, is_out_of_memory

# A margin for what a measurement of memory misses: gaps in the memory of other uses, which no graph can take,
# and the memory that CUDA takes for itself.
_SLACK_BYTES = 64 << 20

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class GraphMemory:
    """The pool that graphs share, and the stream on which they are captured."""

    def __init__(self, device: torch.device) -> None:
        """device: a GPU, with its index."""
        self.reserve_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.Stream(device=device)
        self._rehearsed: list[torch.cuda.CUDAGraph] | None = None

    @property
    def is_rehearsing(self) -> bool:
        return self._rehearsed is not None

    def reserve(self, num_bytes: int) -> None:
        """Reserves memory for steps that are launched kernel by kernel, which graphs that are captured later
        leave free."""
        self.reserve_bytes = max(self.reserve_bytes, num_bytes + _SLACK_BYTES)

    def has_room(self, num_bytes: int) -> bool:
        """Returns whether a step that takes about num_bytes kernel by kernel may be captured. The pool's
        largest free block is used again. Empties the allocator's cache, which a capture cannot use."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        blocks = [b["size"] for s in own for b in s["blocks"] if b["state"] == "inactive"]
        missing = num_bytes - max(blocks, default=0)
        return available_bytes(self._device) - max(missing, 0) >= self.reserve_bytes

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Lets captures within the block go to graphs that are thrown away, in memory that is given back at
        its end."""
        with self._stream:
            one = torch.ones(1, 1, device=self._device)
            one.mm(one)  # the library's memory for this stream, which stays
        self._rehearsed = []
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        try:
            yield
        finally:
            for graph in self._rehearsed:
                graph.reset()
            self._rehearsed, self._pool = None, pool
            torch.cuda.empty_cache()

    def rehearse(self, launch: Callable[[], object]) -> None:
        """Captures the launch without running it. The capture is relaxed, since a library may allocate its
        first memory meanwhile."""
        assert self._rehearsed is not None, "there is no rehearsal"
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._rehearsed.append(graph)  # the pool lives as long as its graphs
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # none of its kernels is loaded
            self._capture(graph, launch, "relaxed")

    def capture(self, launch: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        return graph, self._capture(graph, launch, "thread_local")

    def _capture(self, graph: torch.cuda.CUDAGraph, launch: Callable[[], Result], error_mode: str) -> Result:
        """Captures without torch.cuda.graph, which collects garbage and empties the allocator's cache each
        time."""
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            graph.capture_begin(pool=self._pool, capture_error_mode=error_mode)
            try:
                return launch()
            finally:
                graph.capture_end()


class GraphCache(Generic[Key, Result]):
    """Mutable: `capture` adds graphs, and so does `run` where one is missing. Used by one thread.

    launch: launches what the key stands for, kernel by kernel. memory: holds the graphs.
    """

    def __init__(self, launch: Callable[[Key], Result], memory: GraphMemory) -> None:
        self._launch = launch
        self.memory = memory
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._bytes: dict[Key, int] = {}  # of what has run kernel by kernel
        self._is_too_large: set[Key] = set()
        self._is_frozen = False

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Adds no graph within the block: steps without one are launched kernel by kernel, and count as never
        seen."""
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False

    def capture(self, wanted: Key) -> None:
        """Runs the step once, which compiles its kernels, and captures it. An existing graph stays. In a
        rehearsal the step is neither run nor kept."""
        if wanted in self._graphs:
            return
        if self.memory.is_rehearsing:
            self.memory.rehearse(lambda: self._launch(wanted))
            return
        self._launch(wanted)
        self._graphs[wanted] = self.memory.capture(lambda: self._launch(wanted))

    def capture_all(
        self, wanted: Sequence[Key], progress: Callable[[float], None], *, prepare: Callable[[Key], None]
    ) -> None:
        """Captures in this order. progress: called after each with the share that is done. prepare: called
        before each."""
        started = time.monotonic()
        for done, key in enumerate(wanted, start=1):
            prepare(key)
            self.capture(key)
            progress(done / len(wanted))
        verb = "rehearsed" if self.memory.is_rehearsing else "captured"
        logger.info("%s %d steps in %.1f s", verb, len(wanted), time.monotonic() - started)

    def run(self, wanted: Key) -> tuple[Result, bool]:
        """Returns the outcome of the step, and whether a graph was replayed.

        A step that was never seen is launched kernel by kernel, and captured the next time if there is room.
        Each of these two waits for the device once.
        """
        if self._is_frozen and wanted not in self._graphs:
            return self._launch(wanted), False
        if wanted in self._graphs or self._can_capture(wanted):
            graph, outcome = self._graphs[wanted]
            graph.replay()
            return outcome, True
        if wanted in self._bytes:
            return self._launch(wanted), False
        outcome, self._bytes[wanted] = bytes_taken_by(lambda: self._launch(wanted))
        return outcome, False

    def _can_capture(self, wanted: Key) -> bool:
        """Captures a step that was run before. Returns False for a step that does not fit, or that would take
        memory that others may need: a prefill without memory ends the engine. Such a step stays uncaptured,
        which is only slower."""
        if wanted not in self._bytes or wanted in self._is_too_large:
            return False
        if self.memory.has_room(self._bytes[wanted]):
            try:
                self._graphs[wanted] = self.memory.capture(lambda: self._launch(wanted))
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        logger.warning(
            "%s, of %s, is too large to be captured beside the %s that prompts and rounds may need; it is launched kernel by "
            "kernel, which is slower. Set --kv-cache-memory, --prefill-chunk or --max-running to less",
            wanted,
            format_bytes(self._bytes[wanted]),
            format_bytes(self.memory.reserve_bytes),
        )
        self._is_too_large.add(wanted)
        return False
