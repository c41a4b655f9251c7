"""Turns plans into device work: rows of the slot table, prefill chunks, decode rounds.

Knows tensors and the model; knows nothing of requests beyond their rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from headway.engine.execution.graphs import (
    MAX_REPLAYED_TOKENS,
    GraphMemory,
    Mixed,
    MixedGraphs,
    PrefillGraphs,
    Round,
    RoundGraphs,
)
from headway.engine.execution.host_ring import HostRing, Place
from headway.engine.execution.padded_prefill import (
    HEADER,
    Prefill,
    padded_chunks,
    padded_prefill,
)
from headway.engine.execution.prefill import first_places, last_places, prefill_inputs
from headway.engine.execution.results import DeviceResults, StepHandle
from headway.engine.execution.step import END_STAMP, NUM_STAMPS, Outcome, Prompts, decode_round
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import cut_to_windows
from headway.engine.protocol.errors import ConfigError, describe_fault
from headway.engine.sampling.sampler import NO_TOKEN, SCORED_AT_ONCE, are_broken, pick_tokens, score_tokens
from headway.engine.scheduling.plan import BlockGrant, Plan, PrefillChunk, RowMove, RowSetup
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.memory import available_bytes, bytes_taken_by, is_out_of_memory
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import AdjustmentTable
from headway.engine.state.row_tensors import RowTensors, numbers_of
from headway.engine.state.transfer import to_device
from headway.kernels import (
    FEW_ROWS,
    MIN_ADDED_ROWS,
    begin_decode,
    compile_in_workers,
    most_gated_rows,
    reserve_workspace,
    stamp,
)

WARM_UP_TOKENS = 1024
# Kernels of few rows differ where these are more than 8, than 16 and than FEW_ROWS.
SOME_ROWS = 16

logger = logging.getLogger(__name__)


class Runner:
    """Owns the model, the state pool, the slot table and what stands beside it: the only writer on the host side."""

    def __init__(
        self,
        model: CausalLM,
        pool: StatePool,
        slots: RowTensors,
        drafter: Drafter,
        *,
        max_depth: int,
        adjustments: AdjustmentTable | None = None,
        synthetic: SyntheticAcceptance | None = None,
        prefill_window: int | None = None,
        prefill: PrefillPolicy | None = None,
    ) -> None:
        """prefill_window: prompts are attended in windows of so many tokens; None: in whole chunks. prefill: bounds what a step may ask
        for; None: WARM_UP_TOKENS in every step."""
        prefill = prefill or PrefillPolicy.uniform(WARM_UP_TOKENS)
        self.model = model
        self.pool = pool
        self.slots = slots
        self.device = slots.kv_lengths.device
        self.adjustments = adjustments or AdjustmentTable(
            len(slots.limits), model.spec.vocab_size, self.device
        )
        self._num_logprobs: dict[int, int] = {}  # by row, for those that want any
        self._drafter = drafter
        self._synthetic = synthetic
        self._prefill_window = prefill_window
        self._policy = prefill
        self._views: dict[tuple[int, bool], RowTensors] = {}
        self._graphs: RoundGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        self._graph_memory: GraphMemory | None = None
        self._max_depth = max_depth
        self._ring = HostRing(NUM_STAMPS + len(slots.limits) * (max_depth + 2), self.device)
        if self.device.type == "cuda":
            memory = self._graph_memory = GraphMemory()
            self._graphs = RoundGraphs(self._launch_round, memory, max_rows=len(slots.limits))
            if prefill_window is None:
                most = min(self._policy.most_tokens, self._max_row_tokens, MAX_REPLAYED_TOKENS)
                packed = torch.zeros(HEADER + most, dtype=torch.int64, device=self.device)
                self._prefill_graphs = PrefillGraphs(self._launch_padded_prefill, memory, packed)
                mixed = packed[: HEADER + prefill.mixed]
                self._mixed_graphs = MixedGraphs(
                    self._launch_mixed_round, memory, mixed, max_rows=len(slots.limits)
                )

    @property
    def _max_row_tokens(self) -> int:
        """As many as have a place in a row's block table."""
        return self.slots.granted_block_ids.shape[1] * self.pool.block_size

    @torch.inference_mode()
    def capture(self, depths: Iterable[int], *, progress: Callable[[float], None]) -> None:
        """Makes prefills and the rounds of these depths ready before the first request comes; all rows are
        padding. Nothing to do on the CPU. Raises ConfigError where the memory does not suffice."""
        depths = tuple(depths)
        if self._graphs is None or not depths:
            return
        assert self._graph_memory is not None
        try:
            reserve_workspace(self.device)  # not in memory that a rehearsal gives back
            self._compile(depths, self._graphs, progress)
            _, for_prompts = bytes_taken_by(self._warm_up_prefill)
            self._capture_all(depths, self._graphs, progress)
            _, for_round = bytes_taken_by(lambda: self._try_largest_round(max(depths)))
            if available_bytes(self.device) < for_prompts:
                self._warm_up_prefill()  # graphs may have left it too little
            self._graph_memory.reserve(max(for_prompts, for_round))
            self._ring.restart()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"rounds of {len(self.slots.limits)} requests and {max(depths)} drafts do not fit into the memory that "
                "weights and KV cache leave free; set --max-running, --depth or --kv-cache-memory to less"
            ) from error

    def _try_largest_round(self, depth: int) -> None:
        """Requests may have their logits adjusted and scored, many may start at once: that there is room is tried, not
        taken."""
        num_rows = len(self.slots.limits)
        outcome = self._launch_round(Round(num_rows, depth, is_adjusted=True, keeps_logits=True))
        self._score_round(outcome, range(num_rows))
        del outcome
        self._warm_up_picks(min(num_rows, SCORED_AT_ONCE))

    def _compile(self, depths: Sequence[int], graphs: RoundGraphs, progress: Callable[[float], None]) -> None:
        """Compiles the kernels of all graphs in worker processes, after a rehearsal that records what each launch needs,
        unless a small round finds all its kernels in Triton's cache.

        It only saves time: a kernel that it leaves out is compiled when it is launched.
        """
        assert self._graph_memory is not None
        started, precompiler = time.monotonic(), None
        try:
            free = available_bytes(torch.device("cpu"))
            compiling = compile_in_workers(lambda: progress(0.0), memory_bytes=free // 2)
            with self._graph_memory.rehearsal(), compiling as precompiler:
                graphs.capture_smallest(max(depths))
                if precompiler.has_missing:
                    self._capture_all(depths, graphs, lambda done: progress(0.0))
                    self._graph_memory.rehearse(lambda: self._warm_up_picks(1))
        except Exception:
            logger.warning(
                "the rehearsal failed: further kernels are compiled one after the other", exc_info=True
            )
        if precompiler is not None and precompiler.has_missing:
            logger.info(
                "compiled %d kernels by %d processes in %.1f s",
                precompiler.num_compiled,
                precompiler.num_workers,
                time.monotonic() - started,
            )

    def _capture_all(
        self, depths: Sequence[int], graphs: RoundGraphs, progress: Callable[[float], None]
    ) -> None:
        depth = max(depths)
        fills_drafts = depth > 0
        share_of_mixed = 0.0
        if self._mixed_graphs is not None and self._policy.mixed_above_tokens is not None:
            share_of_mixed = 0.5
            self._mixed_graphs.capture(
                depth,
                self._policy,
                fills_drafts=fills_drafts,
                progress=lambda done: progress(share_of_mixed * done),
            )
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture(
                fills_drafts=fills_drafts, progress=lambda done: progress(share_of_mixed)
            )
        graphs.capture(depths, lambda done: progress(share_of_mixed + (1 - share_of_mixed) * done))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepHandle:
        """Starts all the work of one step, in the order of the plan's fields."""
        if plan.wiped_block_ids:
            self.pool.wipe(self._to_device(plan.wiped_block_ids))
        self._release(plan.released_rows)
        self._move(plan.moves)
        faults = self._set_up(plan.setups)
        self._grant(plan.grants)
        results = DeviceResults(self.device, plan.depth, faults)
        if plan.catches_up:
            self._drafter.catch_up(self._first_rows(len(plan.decode_request_ids), is_adjusted=False))
        fills_drafts = self._max_depth > 0
        if plan.is_mixed:
            self._mix(plan, results, fills_drafts=fills_drafts)
        else:
            self._prefill(plan.prefill, results, fills_drafts=fills_drafts)
            self._decode(len(plan.decode_request_ids), plan.depth, results)
        return StepHandle(results)

    def _decode(self, num_rows: int, depth: int, results: DeviceResults) -> None:
        if num_rows == 0:
            return
        results.round = self._take_place(num_rows, depth)
        self._run_round(self._round_of(num_rows, depth), num_rows, results)

    def _mix(self, plan: Plan, results: DeviceResults, *, fills_drafts: bool) -> None:
        """The round, and the chunks in its forward pass or behind it: their rows are padding to it."""
        num_rows = len(plan.decode_request_ids)
        wanted = self._round_of(num_rows, plan.depth)
        results.round = self._take_place(num_rows, plan.depth)
        graphs = self._mixed_graphs
        mixed = None if graphs is None else graphs.run(wanted, plan.prefill, fills_drafts=fills_drafts)
        if mixed is None:
            self._run_round(wanted, num_rows, results)
            self._prefill(plan.prefill, results, fills_drafts=fills_drafts)
            return
        outcome, results.is_replayed = mixed
        self._score_outcome(outcome, num_rows, results)
        assert outcome.prompt_hidden is not None
        self._finish_chunks(plan.prefill, outcome.prompt_hidden, results, picked=outcome.emitted[:, 1])

    def _round_of(self, num_rows: int, depth: int) -> Round:
        keeps_logits = any(row < num_rows for row in self._num_logprobs)
        return Round(num_rows, depth, self.adjustments.is_used, keeps_logits)

    def _take_place(self, num_rows: int, depth: int) -> Place:
        """Once for each round that a plan asks for, before it is launched."""
        return self._ring.take(NUM_STAMPS + num_rows * (depth + 2))

    def _run_round(self, wanted: Round, num_rows: int, results: DeviceResults) -> None:
        if self._graphs is None:
            outcome = self._launch_round(wanted)
        else:
            outcome, results.is_replayed = self._graphs.run(wanted)
        self._score_outcome(outcome, num_rows, results)

    def _score_outcome(self, outcome: Outcome, num_rows: int, results: DeviceResults) -> None:
        if outcome.logits is not None:
            scored = {row: num_top for row, num_top in self._num_logprobs.items() if row < num_rows}
            results.emitted_logprobs = (scored, self._score_round(outcome, list(scored)))

    def _score_round(self, outcome: Outcome, rows: Sequence[int]) -> torch.Tensor:
        """[rows, depth + 1, score]: of the tokens that the round picked in them, as `score_tokens` has them."""
        assert outcome.logits is not None
        index = self._to_device(rows)
        picked = outcome.emitted[index, 1:].clamp(min=0)
        return score_tokens(outcome.logits[index].flatten(0, 1), picked.flatten()).view(*picked.shape, -1)

    def _launch_mixed_round(self, packed: torch.Tensor, wanted: Mixed) -> Outcome:
        chunks = padded_chunks(packed, self.slots, self.pool.block_size, is_window=False)
        prompts = Prompts(chunks.inputs, chunks.last_places(wanted.round.num_rows))
        outcome = self._launch_round(wanted.round, prompts)
        if wanted.fills_drafts:
            assert outcome.prompt_hidden is not None
            self._drafter.observe_prompts(chunks.tokens, outcome.prompt_hidden)
        return outcome

    def _launch_round(self, wanted: Round, prompts: Prompts | None = None) -> Outcome:
        """With adjustments only while a row uses any, so that nothing is spent on them else."""
        outcome = decode_round(
            self.model,
            self.pool,
            self._first_rows(wanted.num_rows, is_adjusted=wanted.is_adjusted),
            wanted.depth,
            self._drafter,
            self._synthetic,
            keeps_logits=wanted.keeps_logits,
            prompts=prompts,
        )
        self._ring.deliver(outcome.packed, time_index=END_STAMP)
        return outcome

    def _first_rows(self, num_rows: int, *, is_adjusted: bool) -> RowTensors:
        """Returns the first rows of the table; views are made once."""
        key = (num_rows, is_adjusted)
        if key not in self._views:
            adjustments = self.adjustments.first(num_rows) if is_adjusted else None
            self._views[key] = self.slots.first(num_rows, adjustments)
        return self._views[key]

    def _release(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        self.slots.release(self._to_device(rows))
        for row in rows:
            self.adjustments.release(row)
            self._num_logprobs.pop(row, None)

    def _move(self, moves: Sequence[RowMove]) -> None:
        if not moves:
            return
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        self.slots.move(self._to_device(sources), self._to_device(targets))
        for source, target in zip(sources, targets, strict=True):
            self.adjustments.move(source, target)
            if source in self._num_logprobs:
                self._num_logprobs[target] = self._num_logprobs.pop(source)

    def _set_up(self, setups: Sequence[RowSetup]) -> tuple[tuple[int, str], ...]:
        """(request id, what went wrong) of each request that cannot be set up; its row stays padding."""
        faults: list[tuple[int, str]] = []
        numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for setup in setups:
            try:
                self._prepare(setup)
                numbers.append(numbers_of(setup))
            except Exception as error:
                logger.exception("request %d could not be set up", setup.request_id)
                self._release([setup.row])
                faults.append((setup.request_id, describe_fault(error)))
        if numbers:
            integers, floats = (torch.stack(column) for column in zip(*numbers, strict=True))
            self.slots.set_up(self._to_device(integers), to_device(floats, self.device, torch.float32))
        return tuple(faults)

    def _prepare(self, setup: RowSetup) -> None:
        """What a row has beside its numbers, and only if it asks for it."""
        if setup.history is not None:
            self.adjustments.set_up(setup.row, setup.sampling, setup.history)
        if setup.sampling.num_logprobs is not None:
            self._num_logprobs[setup.row] = setup.sampling.num_logprobs

    def _grant(self, grants: Sequence[BlockGrant]) -> None:
        """All new blocks by one copy: places in the flat table, then what goes there."""
        if not grants:
            return
        table = self.slots.granted_block_ids
        width = table.shape[1]
        places = [
            grant.row * width + index
            for grant in grants
            for index in range(grant.first_index, grant.first_index + len(grant.block_ids))
        ]
        ids = [block_id for grant in grants for block_id in grant.block_ids]
        where, what = self._to_device([places, ids])
        table.view(-1).index_copy_(0, where, what)

    def _prefill(self, chunks: Sequence[PrefillChunk], results: DeviceResults, *, fills_drafts: bool) -> None:
        """Computes the chunks; samples after those that are last."""
        if not chunks:
            return
        results.prefill_stamps = torch.empty(2, dtype=torch.int64, device=self.device)
        stamp(results.prefill_stamps[:1])
        self._finish_chunks(chunks, self._compute(chunks, fills_drafts=fills_drafts), results)
        stamp(results.prefill_stamps[1:])

    def _finish_chunks(
        self,
        chunks: Sequence[PrefillChunk],
        hidden: torch.Tensor,
        results: DeviceResults,
        picked: torch.Tensor | None = None,  # [rows] int64: what follows their chunks, by row
    ) -> None:
        """Samples after the chunks that are last, and scores. hidden: as `_compute` returns it."""
        last = [chunk for chunk in chunks if chunk.is_last]
        if last:
            of_last = hidden[self._to_device(last_places(chunks))]
            if picked is not None and any(chunk.row >= len(picked) for chunk in last):
                picked = None
            self._start_rows(last, of_last, results, picked)
        if any(chunk.scored_token_ids for chunk in chunks):
            results.prompt_logprobs = [
                self._score_prompt(chunk, hidden[first:])
                for chunk, first in zip(chunks, first_places(chunks), strict=True)
            ]

    def _compute(self, chunks: Sequence[PrefillChunk], *, fills_drafts: bool) -> torch.Tensor:
        """[tokens or more, hidden]: the trunk's states of the chunks' tokens in their order."""
        hidden = None
        if self._prefill_graphs is not None:
            hidden = self._prefill_graphs.run(chunks, fills_drafts=fills_drafts)
        return self._launch_prefill(chunks, fills_drafts=fills_drafts) if hidden is None else hidden

    def _launch_prefill(self, chunks: Sequence[PrefillChunk], *, fills_drafts: bool) -> torch.Tensor:
        """As `_compute`, of any size, kernel by kernel."""
        tokens = prefill_inputs(
            chunks,
            self.slots,
            self.pool.block_size,
            sharing=self.model.spec.attention.num_heads // self.model.spec.attention.num_kv_heads,
        )
        if self._prefill_window is not None:
            tokens = replace(tokens, inputs=cut_to_windows(tokens.inputs, self._prefill_window))
        hidden = self.model.forward(tokens.inputs, self.pool)
        if fills_drafts:
            self._drafter.observe_prompts(tokens, hidden)
        return hidden

    def _launch_padded_prefill(self, packed: torch.Tensor, wanted: Prefill) -> torch.Tensor:
        return padded_prefill(self.model, self.pool, self.slots, self._drafter, packed, wanted)

    def _warm_up_prefill(self) -> None:
        """Prompts whose row has no blocks, so that they are written nowhere: their kernels are compiled, and the most
        that a step may take is tried. Raises ConfigError."""
        most, drafts, config = self._policy.most_tokens, self._max_depth > 0, self.model.spec
        gate_up = 2 * config.intermediate_size, config.hidden_size
        dense = most_gated_rows(most, gate_up, self.model.dtype, self.device)
        steps = [self._lengths_of(size) for size in sorted({min(WARM_UP_TOKENS, most), most, dense} - {0})]
        if not drafts:
            # Prompts that no graph is for may have one token too few for products that add themselves.
            steps.append(self._lengths_of(min(MIN_ADDED_ROWS - 1, most)))
        for lengths in steps:
            chunks = [PrefillChunk(0, 0, 0, (0,) * n, hidden_block_id=None, is_last=True) for n in lengths]
            try:
                self._launch_prefill(chunks, fills_drafts=drafts)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise ConfigError(
                    f"a step with {sum(lengths):,} prompt tokens does not fit into the memory that weights and KV cache "
                    "leave free; set --prefill-chunk, or --kv-cache-memory, to less"
                ) from error
        self._drafter.catch_up(self.slots)
        # Prompts are scored by any number of tokens, rounds may all have fewer.
        for num_scored in (SOME_ROWS, FEW_ROWS, SCORED_AT_ONCE):
            logits = self.model.logits(self.slots.chunk_hidden[:1].expand(num_scored, -1).contiguous())
            score_tokens(logits, torch.zeros(num_scored, dtype=torch.int64, device=self.device))
        self._warm_up_picks(1)

    def _warm_up_picks(self, num_prompts: int) -> None:
        """What follows prompts, without and with adjustments; all of row 0, which stays padding."""
        index = torch.zeros(num_prompts, dtype=torch.int64, device=self.device)
        logits = self.model.logits(self.slots.chunk_hidden[:1].expand(num_prompts, -1).contiguous())
        for adjustments in (None, self.adjustments.at(index)):
            rows = self.slots.at(index, adjustments)
            pick_tokens(logits[:, None], rows, index, index[:, None][:, :0])
        row = index[:1]
        begin_decode(self.slots.state(), row, row, row + 1, self.pool.block_size)
        self.slots.release(row)

    def _lengths_of(self, num_tokens: int) -> list[int]:
        """Of as few prompts as hold so many tokens."""
        whole, rest = divmod(num_tokens, self._max_row_tokens)
        return [self._max_row_tokens] * whole + ([rest] if rest else [])

    def _score_prompt(self, chunk: PrefillChunk, hidden: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """hidden: [tokens, hidden], from the chunk's first. The vocabulary's logits exist for a few at a time."""
        if not chunk.scored_token_ids:
            return None
        tokens = torch.split(self._to_device(chunk.scored_token_ids), SCORED_AT_ONCE)
        states = torch.split(hidden[: len(chunk.scored_token_ids)], SCORED_AT_ONCE)
        scores = [score_tokens(self.model.logits(h), t) for h, t in zip(states, tokens, strict=True)]
        return chunk.num_top, torch.cat(scores)

    def _start_rows(
        self,
        chunks: Sequence[PrefillChunk],
        hidden: torch.Tensor,  # [chunks, hidden], of the last prompt tokens
        results: DeviceResults,
        picked: torch.Tensor | None,  # [rows] int64: what follows the prompts, by row
    ) -> None:
        """The rows' prompts are in the cache: pick their first tokens, if they are not, and let rounds have them."""
        slots = self.slots
        lengths = [chunk.start + len(chunk.token_ids) for chunk in chunks]
        index, length = self._to_device([[chunk.row for chunk in chunks], lengths])
        if picked is None:
            tokens, results.first_tokens = self._pick_first(chunks, index, length, hidden, results)
        else:
            assert not any(chunk.row in self._num_logprobs for chunk in chunks), (
                "the round's picks are not scored"
            )
            results.first_tokens = picked[index]
            tokens = results.first_tokens.clamp(min=0)
        self.adjustments.count(index, tokens)
        begin_decode(slots.state(), index, tokens, length, self.pool.block_size)

    def _pick_first(
        self,
        chunks: Sequence[PrefillChunk],
        index: torch.Tensor,  # [chunks] int64: their rows
        positions: torch.Tensor,  # [chunks] int64: behind the prompts
        hidden: torch.Tensor,  # [chunks, hidden], of the last prompt tokens
        results: DeviceResults,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[chunks] int64: the tokens at these positions, scored where that is wanted; the same for the host, with NO_TOKEN
        where logits were no numbers. Some at a time: a row's adjustments,
        which are copied, are 9 bytes for each token of the vocabulary."""
        wanted = {i: n for i, c in enumerate(chunks) if (n := self._num_logprobs.get(c.row)) is not None}
        tokens, told, scores = [], [], []
        for first in range(0, len(chunks), SCORED_AT_ONCE):
            part = slice(first, first + SCORED_AT_ONCE)
            some = index[part]
            rows = self.slots.at(some, self.adjustments.at(some) if self.adjustments.is_used else None)
            logits = self.model.logits(hidden[part])
            picked = pick_tokens(logits[:, None], rows, positions[part], some.new_zeros((len(some), 0)))[:, 0]
            tokens.append(picked)
            told.append(picked.masked_fill(are_broken(logits), NO_TOKEN))
            places = [i - first for i in wanted if first <= i < part.stop]
            if places:
                scored = self._to_device(places)
                scores.append(score_tokens(logits[scored], picked[scored]))
        if wanted:
            results.first_logprobs = (wanted, torch.cat(scores)[:, None])
        return torch.cat(tokens), torch.cat(told)

    def _to_device(self, values: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor) -> torch.Tensor:
        return to_device(values, self.device)
