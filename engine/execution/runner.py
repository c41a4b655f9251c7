"""Executes plans on the device: changes of rows, chunks of prompts, decode rounds.

Knows tensors and the model, and of requests only their rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from headway.engine.execution.commands import (
    Begin,
    Capture,
    Command,
    Finish,
    Launch,
    TimeCatchUp,
    TimeRound,
    tell_nobody,
)
from headway.engine.execution.device_rows import DeviceRows
from headway.engine.execution.graphs import GraphCache, GraphMemory
from headway.engine.execution.host_ring import HostRing, RingSlot
from headway.engine.execution.launcher import StepLauncher
from headway.engine.execution.masked_step import BegunStep, MaskedStep
from headway.engine.execution.prompt_ends import PromptEnds
from headway.engine.execution.results import DeviceResults, StepHandle
from headway.engine.execution.round_times import CPU_SECONDS, measured_rounds
from headway.engine.execution.step import END_STAMP, NUM_STAMPS, StepContext, StepOutcome
from headway.engine.execution.step_key import MAX_REPLAYED_TOKENS, StepGrid, StepKey, row_counts
from headway.engine.execution.warm_up import WARM_UP_TOKENS, WarmUp
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.scheduling.plan import Plan, PrefillChunk
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.relaxed import RelaxedAcceptance
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.masks import Masks, MaskTable
from headway.engine.state.pool import StatePool
from headway.engine.state.processors import LogitsProcessorTable
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.transfer import to_device, wait_for
from headway.kernels import stamp


class Runner:
    """Owns the model, the state pool and the table of rows. Mutable: it is their only writer on the host."""

    def __init__(
        self,
        model: CausalLM,
        pool: StatePool,
        rows: RowTensors,
        drafter: Drafter,
        *,
        max_depth: int,
        processors: LogitsProcessorTable | None = None,
        masks: MaskTable | None = None,
        synthetic: SyntheticAcceptance | None = None,
        relaxed: RelaxedAcceptance | None = None,
        prefill: PrefillPolicy | None = None,
        tell: Callable[[Command], None] = tell_nobody,
    ) -> None:
        """prefill: bounds the prompt tokens of a step; None: WARM_UP_TOKENS in every step. tell: called with
        each command for the runners of the other ranks before it is executed here."""
        policy = prefill or PrefillPolicy.uniform(WARM_UP_TOKENS)
        self.model = model
        self._tell = tell
        self.pool = pool
        self.rows = rows
        self.device = rows.limits.device
        self.processors = processors or LogitsProcessorTable(
            len(rows.limits), model.spec.vocab_size, self.device
        )
        self.table = DeviceRows(rows, pool, self.processors, relaxed)
        self.masks = masks or MaskTable(len(rows.limits), max_depth + 1, model.spec.vocab_size, self.device)
        self._ring = HostRing(NUM_STAMPS + len(rows.limits) * (max_depth + 2), self.device)
        self._draft_ring = HostRing(1 + len(rows.limits) * max(max_depth, 1), self.device)
        most = min(policy.most_tokens, rows.granted_block_ids.shape[1] * pool.block_size, MAX_REPLAYED_TOKENS)
        kept_logits = None
        if self.device.type == "cuda":
            num_logits = len(rows.limits) * (max_depth + 1)
            kept_logits = model.no_states(num_logits).new_empty(num_logits, model.spec.vocab_size)
        context = StepContext(
            model, pool, drafter, synthetic, relaxed, self._ring, self._draft_ring, kept_logits
        )
        self.launcher = StepLauncher(context, self.table, self.masks, max_prompt_tokens=most)
        self.prompt_ends = PromptEnds(model, self.table, block_size=pool.block_size)
        # On a CPU nothing is padded: grid and graphs are None.
        self.grid: StepGrid | None = None
        self.graphs: GraphCache[StepKey, StepOutcome] | None = None
        memory = None
        if self.device.type == "cuda":
            memory = GraphMemory(self.device)
            self.graphs = GraphCache(self.launcher.launch, memory)
            self.grid = StepGrid.of(len(rows.limits), most, policy.mixed)
        self.warm_up = WarmUp(self.launcher, self.prompt_ends, self.table, policy, max_depth=max_depth)
        self._masked_step = MaskedStep(self.launcher, memory)

    @torch.inference_mode()
    def capture(self, depths: Iterable[int], *, progress: Callable[[float], None]) -> None:
        """Compiles and captures the steps of these depths before the first request; all rows are padding.
        Does nothing on a CPU. Raises ConfigError where the memory does not suffice."""
        depths = tuple(depths)
        if self.graphs is None or not depths:
            return
        self._tell(Capture(depths))
        self.warm_up.capture(self._captured_keys(depths), self.graphs, progress)
        self._ring.restart()

    @torch.inference_mode()
    def measured_bytes(self, depths: Sequence[int], *, progress: Callable[[float], None]) -> int:
        """Returns the GPU memory that steps of these depths and their graphs will take. Compiles their
        kernels, and keeps the memory that it has allocated. Raises ConfigError where the memory does not
        suffice."""
        assert self.graphs is not None, "steps are not captured on a CPU"
        return self.warm_up.measured_bytes(self._captured_keys(depths), self.graphs, progress)

    def _captured_keys(self, depths: Collection[int]) -> list[StepKey]:
        assert self.grid is not None, "steps are not captured on a CPU"
        return self.grid.captured(
            depths,
            self.warm_up.policy,
            catches_up=self.launcher.context.drafter.traits.leaves_pending and max(depths) > 0,
        )

    def without_captures(self) -> AbstractContextManager[None]:
        """Keeps steps without a graph from being captured: within the block they are launched kernel by
        kernel, and do not count as seen. Their kernels are those of captured steps of the same sizes, so that
        none is compiled."""
        return nullcontext() if self.graphs is None else self.graphs.frozen()

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Returns the numbers of rows to which rounds are padded. On a CPU nothing is padded, and they only
        group the measured times of rounds."""
        return row_counts(len(self.rows.limits)) if self.grid is None else self.grid.row_counts

    @torch.inference_mode()
    def measure_rounds(self, depths: Iterable[int]) -> dict[tuple[int, int], float]:
        """Measures rounds of these depths before the first request. Returns their seconds by (rows,
        depth)."""
        found = self._measured(self.time_round, depths)
        self._ring.restart()
        return found

    @torch.inference_mode()
    def measure_catch_ups(self) -> dict[int, float]:
        """Measures how long the drafter takes to catch up, before the first request. Returns the seconds by
        rows; empty if it never has to."""
        if not self.launcher.context.drafter.traits.leaves_pending:
            return {}
        found = self._measured(lambda rows, _: self.time_catch_up(rows), (0,))
        return {rows: seconds for (rows, _), seconds in found.items()}

    def _measured(
        self, run: Callable[[int, int], float], depths: Iterable[int]
    ) -> dict[tuple[int, int], float]:
        limit = None if self.device.type == "cuda" else CPU_SECONDS
        return measured_rounds(run, self.row_counts, depths, limit_seconds=limit)

    @torch.inference_mode()
    def time_round(self, num_rows: int, depth: int) -> float:
        """Runs a round of padding before the first request. Returns its seconds."""
        self._tell(TimeRound(num_rows, depth))
        slot = self._ring.take(NUM_STAMPS)
        self._run(StepKey(num_rows, depth))
        wait_for(self.device)
        times = slot.read()
        return (times[END_STAMP] - times[0]) / 1e9

    @torch.inference_mode()
    def time_catch_up(self, num_rows: int) -> float:
        """Lets the drafter catch up with padding before the first request. Returns the seconds."""
        self._tell(TimeCatchUp(num_rows))
        began = time.perf_counter()
        self._catch_up(num_rows)
        wait_for(self.device)
        return time.perf_counter() - began

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepHandle:
        """Launches a step without masked rows, in the order of the plan's fields."""
        self._tell(Launch(plan))
        results, key = self._start(plan)
        if key is not None:
            self._decode(key, plan, results)
        if plan.prefill and (key is None or not key.num_prompt_tokens):
            self._prefill(plan.prefill, results)
        self.table.save(plan.saves)
        return StepHandle(results)

    @torch.inference_mode()
    def begin(self, plan: Plan) -> BegunStep:
        """Launches the first half of a step with masked rows, up to the logits of its round, or of its
        prompts if there is no round."""
        self._tell(Begin(plan))
        results, key = self._start(plan)
        buffer, num_rows = self.masks.buffer, len(plan.decode_request_ids)
        if key is None:
            hidden = self._begin_prefill(plan.prefill, results)
            finish = self._told(partial(self._finish_prefill, plan, results, hidden))
            return BegunStep(finish, buffer, None, 0)
        key = key._replace(is_masked=True)
        results.round = self._take_ring_slot(num_rows, plan.depth)
        drafts = None
        if plan.depth > 0:
            drafts = self._draft_ring.take(1 + num_rows * plan.depth, is_read_early=True)
        if key.num_prompt_tokens:
            self.launcher.pack(plan.prefill, key)
        self._masked_step.begin(key)
        finish = self._told(partial(self._finish_masked, key, plan, results))
        return BegunStep(finish, buffer, drafts, num_rows)

    def _told(
        self, finish: Callable[[Mapping[int, int]], StepHandle]
    ) -> Callable[[Mapping[int, int]], StepHandle]:
        """Returns the second half of a step, which tells other ranks first, if there are any."""

        def tell_and_finish(entries: Mapping[int, int]) -> StepHandle:
            self._tell(Finish(dict(entries), self.masks.filled(len(entries))))
            return finish(entries)

        return finish if self.model.group.size == 1 else tell_and_finish

    @torch.inference_mode()
    def _finish_masked(
        self, key: StepKey, plan: Plan, results: DeviceResults, entries: Mapping[int, int]
    ) -> StepHandle:
        masks = self.masks.upload(entries)
        outcome, results.is_replayed = self._masked_step.finish(key)
        self._take_outcome(key, outcome, plan, results)
        if plan.prefill and not key.num_prompt_tokens:
            self._prefill(plan.prefill, results, masks)
        self.table.save(plan.saves)
        return StepHandle(results)

    @torch.inference_mode()
    def _finish_prefill(
        self, plan: Plan, results: DeviceResults, hidden: torch.Tensor, entries: Mapping[int, int]
    ) -> StepHandle:
        self._end_prefill(plan.prefill, hidden, results, self.masks.upload(entries))
        self.table.save(plan.saves)
        return StepHandle(results)

    def _start(self, plan: Plan) -> tuple[DeviceResults, StepKey | None]:
        """Applies the changes of rows, and lets the drafter catch up. Returns the results to be filled, and
        the key of the round if there is one."""
        if plan.wiped_block_ids:
            self.pool.wipe(to_device(plan.wiped_block_ids, self.device))
        results = DeviceResults(self.device, plan.depth, self.table.update(plan))
        if plan.setups:
            self._agree_on(len(results.faults))
        num_rows = len(plan.decode_request_ids)
        if plan.catches_up:
            self._catch_up(num_rows)
        if not num_rows:
            return results, None
        wanted = self._round_key(num_rows, plan.depth)
        mixed = None
        if plan.is_mixed and self.grid is not None:
            mixed = self.grid.mixed(wanted, plan.prefill)
        return results, mixed or wanted

    def _agree_on(self, num_faults: int) -> None:
        """Asserts that all ranks have failed to set up the same number of requests. Otherwise a row would be
        padding on some ranks only."""
        group = self.model.group
        if group.size > 1:
            counts = group.gather(torch.tensor([[num_faults]]))[0].tolist()
            assert len(set(counts)) == 1, f"of this step's requests ranks could not set up {counts}"

    def _catch_up(self, num_rows: int) -> None:
        late = StepKey(num_rows, catches_up=True)
        self._run(late if self.grid is None else self.grid.catch_up(num_rows))

    def _round_key(self, num_rows: int, depth: int) -> StepKey:
        wanted = StepKey(
            num_rows,
            depth,
            is_adjusted=self.processors.is_used,
            keeps_logits=any(row < num_rows for row in self.table.num_logprobs),
        )
        return wanted if self.grid is None else self.grid.round(wanted)

    def _decode(self, key: StepKey, plan: Plan, results: DeviceResults) -> None:
        """Runs the round, and the prompts in its pass if the key has any; their rows are padding in the
        round."""
        results.round = self._take_ring_slot(len(plan.decode_request_ids), plan.depth)
        if key.num_prompt_tokens:
            self.launcher.pack(plan.prefill, key)
        outcome, results.is_replayed = self._run(key)
        self._take_outcome(key, outcome, plan, results)

    def _take_outcome(self, key: StepKey, outcome: StepOutcome, plan: Plan, results: DeviceResults) -> None:
        """Scores the tokens of the round, and starts decoding in rows whose prompts shared its pass."""
        num_rows = len(plan.decode_request_ids)
        assert outcome.round is not None, "the step has a round"
        if outcome.round.logits is not None:
            scored = {row: num_top for row, num_top in self.table.num_logprobs.items() if row < num_rows}
            results.emitted_logprobs = (scored, outcome.round.score(to_device(list(scored), self.device)))
        if key.num_prompt_tokens:
            assert outcome.prompt_hidden is not None, "the step has prompts"
            sampled = outcome.round.emitted[:, 1]
            masks = self.masks.all if key.is_masked else None
            self.prompt_ends.finish(
                plan.prefill, outcome.prompt_hidden, results, sampled=sampled, masks=masks
            )

    def _take_ring_slot(self, num_rows: int, depth: int) -> RingSlot:
        """Takes the ring slot of a round. It is called once for each round, before the launch."""
        return self._ring.take(NUM_STAMPS + num_rows * (depth + 2))

    def _prefill(
        self, chunks: Sequence[PrefillChunk], results: DeviceResults, masks: Masks | None = None
    ) -> None:
        """Computes the chunks in a pass of their own."""
        self._end_prefill(chunks, self._begin_prefill(chunks, results), results, masks)

    def _begin_prefill(self, chunks: Sequence[PrefillChunk], results: DeviceResults) -> torch.Tensor:
        """Returns what `_compute` returns."""
        results.prefill_stamps = torch.empty(2, dtype=torch.int64, device=self.device)
        stamp(results.prefill_stamps[:1])
        return self._compute(chunks)

    def _end_prefill(
        self,
        chunks: Sequence[PrefillChunk],
        hidden: torch.Tensor,
        results: DeviceResults,
        masks: Masks | None,
    ) -> None:
        assert results.prefill_stamps is not None, "the pass was begun"
        self.prompt_ends.finish(chunks, hidden, results, masks=masks)
        stamp(results.prefill_stamps[1:])

    def _compute(self, chunks: Sequence[PrefillChunk]) -> torch.Tensor:
        """Returns [tokens or more, hidden]: the hidden states of the chunks' tokens in their order."""
        key = None if self.grid is None else self.grid.prompts(chunks)
        if key is None:
            return self.launcher.launch_chunks(chunks)
        self.launcher.pack(chunks, key)
        hidden = self._run(key)[0].prompt_hidden
        assert hidden is not None, "the step has prompts"
        return hidden

    def _run(self, key: StepKey) -> tuple[StepOutcome, bool]:
        """Returns the outcome, and whether a graph was replayed."""
        return (self.launcher.launch(key), False) if self.graphs is None else self.graphs.run(key)
