"""What runs over and over as CUDA graphs: decode rounds for each padded number of rows and depth, prefills for each
padded number of tokens, large rounds with the tokens of prompts, all from one memory pool.

Knows how to capture and which graph to take; what a round or a prefill does is theirs. A graph's outcome lies in the
pool's memory until any graph is replayed: copies of it are to be launched before that, on the same stream. No graph may
have branches: where one has, an H200 starts each kernel of every graph some 0.3 us later.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

import torch

from headway.engine.execution.padded_prefill import (
    HEADER,
    Prefill,
    packed_chunks,
    padded_count,
    prefills_of,
    smallest_prefill,
)
from headway.engine.execution.step import Outcome
from headway.engine.scheduling.plan import PrefillChunk, is_near
from headway.engine.scheduling.prefill_policy import MAX_MIXED_TOKENS, MIXED_STEP, PrefillPolicy
from headway.engine.state.memory import available_bytes, bytes_taken_by, format_bytes, is_out_of_memory
from headway.engine.state.transfer import copy_to_device

# From 64 rows on a round's time grows with its rows, and what a larger graph computes in vain costs as much.
_ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112)
ROW_STEP = 32
# Longer prefills take the device longer than a slow host takes to launch them kernel by kernel (7B model, H200).
MAX_REPLAYED_TOKENS = 1024
_TOKEN_COUNTS = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, MAX_REPLAYED_TOKENS)
# What a measure of memory misses: gaps in what other uses hold, which no graph can take, and what CUDA itself takes.
_SLACK_BYTES = 64 << 20

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Round(NamedTuple):
    """What one graph is made for. keeps_logits: the outcome has them; graphs captured later leave them their memory."""

    num_rows: int
    depth: int
    is_adjusted: bool = False
    keeps_logits: bool = False


class Mixed(NamedTuple):
    """A round with up to num_tokens tokens of prompts. fills_drafts: the MTP layer sees those too."""

    round: Round
    num_tokens: int
    fills_drafts: bool


class GraphMemory:
    """The pool that graphs share, and the stream on which they are captured."""

    def __init__(self) -> None:
        self.reserve_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.Stream(device="cuda")
        self._rehearsed: list[torch.cuda.CUDAGraph] | None = None

    @property
    def is_rehearsing(self) -> bool:
        return self._rehearsed is not None

    def reserve(self, num_bytes: int) -> None:
        """What is launched kernel by kernel may take so much at a time: graphs captured late leave it free."""
        self.reserve_bytes = max(self.reserve_bytes, num_bytes + _SLACK_BYTES)

    def has_room(self, num_bytes: int) -> bool:
        """Whether what takes about so much kernel by kernel may be captured. The largest block that the pool has free serves
        again. Gives back what the allocator keeps, for a capture cannot take that."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        own = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        blocks = [b["size"] for s in own for b in s["blocks"] if b["state"] == "inactive"]
        missing = num_bytes - max(blocks, default=0)
        return available_bytes(torch.device("cuda")) - max(missing, 0) >= self.reserve_bytes

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """While it lasts graphs are captured to be thrown away, in memory that is given back at its end."""
        with self._stream:
            one = torch.ones(1, 1, device="cuda")
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
        """Runs nothing. Relaxed: a library may allocate its first memory meanwhile."""
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
        """Without torch.cuda.graph, which collects garbage and empties the allocator's cache each time."""
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            graph.capture_begin(pool=self._pool, capture_error_mode=error_mode)
            try:
                return launch()
            finally:
                graph.capture_end()


class Graphs(Generic[Key, Result]):
    """Mutable: graphs are added by `capture`, and by `run` where one is missing. Used by one thread.

    launch: launches what the key stands for, kernel by kernel.
    """

    def __init__(self, launch: Callable[[Key], Result], memory: GraphMemory) -> None:
        self._launch = launch
        self._memory = memory
        self._graphs: dict[Key, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._bytes: dict[Key, int] = {}  # of what has run kernel by kernel
        self._is_too_large: set[Key] = set()

    def capture(self, wanted: Key) -> None:
        """Runs it once before it is captured, which compiles its kernels. What was captured before stays. In a rehearsal
        it is neither run nor kept."""
        if wanted in self._graphs:
            return
        if self._memory.is_rehearsing:
            self._memory.rehearse(lambda: self._launch(wanted))
            return
        self._launch(wanted)
        self._graphs[wanted] = self._memory.capture(lambda: self._launch(wanted))

    def capture_all(
        self,
        wanted: Sequence[Key],
        what: str,
        *,
        prepare: Callable[[Key], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """In this order. prepare: called before each; progress: after each, with the share that is done."""
        started = time.monotonic()
        for done, key in enumerate(wanted, start=1):
            if prepare is not None:
                prepare(key)
            self.capture(key)
            if progress is not None:
                progress(done / len(wanted))
        verb = "rehearsed" if self._memory.is_rehearsing else "captured"
        logger.info("%s %d %s in %.1f s", verb, len(wanted), what, time.monotonic() - started)

    def run(self, wanted: Key) -> tuple[Result, bool]:
        """(what it gives, whether it was replayed).

        One that was never seen is run kernel by kernel, and captured the next time, where there is room. Both wait for
        the device, once for each.
        """
        if wanted in self._graphs or self._can_capture(wanted):
            graph, outcome = self._graphs[wanted]
            graph.replay()
            return outcome, True
        if wanted in self._bytes:
            return self._launch(wanted), False
        outcome, self._bytes[wanted] = bytes_taken_by(lambda: self._launch(wanted))
        return outcome, False

    def _can_capture(self, wanted: Key) -> bool:
        """Captures what was run before. What does not fit stays as it is: slower, no worse. So does what would take memory
        that others may need: a prefill that finds none ends the engine."""
        if wanted not in self._bytes or wanted in self._is_too_large:
            return False
        if self._memory.has_room(self._bytes[wanted]):
            try:
                self._graphs[wanted] = self._memory.capture(lambda: self._launch(wanted))
                return True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        logger.warning(
            "%s, of %s, is too large to be captured beside the %s that prompts and rounds may need; it is launched kernel by "
            "kernel, which is slower. Set --kv-cache-memory, --prefill-chunk or --max-running to less",
            wanted,
            format_bytes(self._bytes[wanted]),
            format_bytes(self._memory.reserve_bytes),
        )
        self._is_too_large.add(wanted)
        return False


class RoundGraphs:
    """Rounds over the first rows of the slot table."""

    def __init__(self, launch: Callable[[Round], Outcome], memory: GraphMemory, *, max_rows: int) -> None:
        self._graphs = Graphs(launch, memory)
        self._row_counts = row_counts(max_rows)

    def capture(self, depths: Iterable[int], progress: Callable[[float], None]) -> None:
        """The plain rounds, the largest first, so that the smaller ones fit into their memory.

        Only while every row of the table is padding. progress: called with the share that is done.
        """
        deepest_first = sorted(depths, reverse=True)
        rounds = [Round(n, depth) for n in reversed(self._row_counts) for depth in deepest_first]
        self._graphs.capture_all(rounds, "rounds", progress=progress)

    def capture_smallest(self, depth: int) -> None:
        self._graphs.capture(Round(self._row_counts[0], depth))

    def run(self, wanted: Round) -> tuple[Outcome, bool]:
        """(what the round gives for at least so many rows, whether it was replayed)."""
        return self._graphs.run(padded_round(wanted, self._row_counts))


class MixedGraphs:
    """Rounds whose forward pass computes parts of prompts too. Where prompts are few tokens, what they take is little
    beside what reading the weights once more for them alone would.

    launch: given the chunks as `packed_chunks` makes them, on the device.
    """

    def __init__(
        self,
        launch: Callable[[torch.Tensor, Mixed], Outcome],
        memory: GraphMemory,
        packed: torch.Tensor,  # [HEADER + tokens] int64, from where graphs read chunks
        *,
        max_rows: int,
    ) -> None:
        self._graphs = Graphs(self._launch, memory)
        self._compute = launch
        self._packed = packed
        self._row_counts = row_counts(max_rows)
        self._token_counts = mixed_token_counts(len(packed) - HEADER)

    def capture(
        self, depth: int, policy: PrefillPolicy, *, fills_drafts: bool, progress: Callable[[float], None]
    ) -> None:
        """Captures what the policy may ask for with plain rounds of one depth, the largest first. Only while every row of the
        table is padding. progress: called with the share that is done."""
        wanted = [
            Mixed(Round(n, depth), m, fills_drafts)
            for n in reversed(self._row_counts)
            for m in reversed(self._token_counts)
            if policy.may_mix(n * (depth + 1), m)
        ]
        self._graphs.capture_all(wanted, "rounds with prompts", prepare=self._pack, progress=progress)

    def run(
        self, wanted: Round, chunks: Sequence[PrefillChunk], *, fills_drafts: bool
    ) -> tuple[Outcome, bool] | None:
        """As RoundGraphs.run; None: no graph is for these chunks."""
        padded = padded_round(wanted, self._row_counts)
        mixed = smallest_mixed(padded, chunks, self._token_counts, fills_drafts=fills_drafts)
        if mixed is None:
            return None
        copy_to_device(packed_chunks(chunks, mixed.num_tokens), self._packed)
        return self._graphs.run(mixed)

    def _pack(self, wanted: Mixed) -> None:
        _pack_any(wanted.num_tokens, self._packed)

    def _launch(self, wanted: Mixed) -> Outcome:
        return self._compute(self._packed[: HEADER + wanted.num_tokens], wanted)


class PrefillGraphs:
    """Prefills of few tokens, which the host would launch more slowly than the device computes them.

    launch: given the chunks as `packed_chunks` makes them, on the device.
    """

    def __init__(
        self,
        launch: Callable[[torch.Tensor, Prefill], torch.Tensor],
        memory: GraphMemory,
        packed: torch.Tensor,  # [HEADER + tokens] int64, from where graphs read chunks
    ) -> None:
        self._graphs = Graphs(self._launch, memory)
        self._compute = launch
        self._token_counts = token_counts(len(packed) - HEADER)
        self._packed = packed

    def capture(self, *, fills_drafts: bool, progress: Callable[[float], None]) -> None:
        """The largest first. Only while row 0 of the slot table is padding: its blocks are nobody's. progress: called with
        the share that is done."""
        wanted = sorted(prefills_of(self._token_counts, fills_drafts=fills_drafts), reverse=True)
        self._graphs.capture_all(wanted, "prefills", prepare=self._pack, progress=progress)

    def run(self, chunks: Sequence[PrefillChunk], *, fills_drafts: bool) -> torch.Tensor | None:
        """[tokens or more, hidden]: the states of the chunks' tokens, then those of padding. None: no graph is for them."""
        wanted = smallest_prefill(chunks, self._token_counts, fills_drafts=fills_drafts)
        if wanted is None:
            return None
        copy_to_device(packed_chunks(chunks, wanted.num_tokens), self._packed)
        hidden, _ = self._graphs.run(wanted)
        return hidden

    def _pack(self, wanted: Prefill) -> None:
        _pack_any(wanted.num_tokens, self._packed)

    def _launch(self, wanted: Prefill) -> torch.Tensor:
        return self._compute(self._packed[: HEADER + wanted.num_tokens], wanted)


def padded_round(wanted: Round, counts: Sequence[int]) -> Round:
    """Of the first of the row counts, ascending, that holds its rows."""
    return wanted._replace(num_rows=next(n for n in counts if n >= wanted.num_rows))


def smallest_mixed(
    wanted: Round, chunks: Sequence[PrefillChunk], counts: Sequence[int], *, fills_drafts: bool
) -> Mixed | None:
    """The round with one of the token counts, ascending, which holds the chunks; None: they are better off without."""
    num_tokens = padded_count(chunks, counts)
    return None if num_tokens is None or not is_near(chunks) else Mixed(wanted, num_tokens, fills_drafts)


def _pack_any(num_tokens: int, packed: torch.Tensor) -> None:
    """One chunk, of row 0."""
    chunk = PrefillChunk(0, 0, 0, (0,) * num_tokens, hidden_block_id=None, is_last=False)
    copy_to_device(packed_chunks([chunk], num_tokens), packed)


def row_counts(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, ... and max_rows."""
    steps = range(_ROW_COUNTS[-1] // ROW_STEP * ROW_STEP + ROW_STEP, max_rows, ROW_STEP)
    return (*(n for n in (*_ROW_COUNTS, *steps) if n < max_rows), max_rows)


def token_counts(max_tokens: int) -> tuple[int, ...]:
    """Those of _TOKEN_COUNTS that fit, at least one."""
    return tuple(n for n in _TOKEN_COUNTS if n <= max_tokens) or (max_tokens,)


def mixed_token_counts(max_tokens: int) -> tuple[int, ...]:
    """Returns the prompt tokens of captured mixed rounds: multiples of MIXED_STEP below max_tokens, or MAX_MIXED_TOKENS, and that."""
    most = min(max_tokens, MAX_MIXED_TOKENS)
    return (*range(MIXED_STEP, most, MIXED_STEP), most)
