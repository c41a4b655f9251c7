"""The scheduler against a simulated device: whatever happens, the text is the oracle's and no block is
lost."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Literal

import hypothesis.strategies as st
import pytest
from headway_testing.fake_masks import END_ID, PATTERNS, new_guide
from headway_testing.fake_runner import VOCAB_SIZE, FakeHandle, FakeRunner, oracle_output
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DRAFTER_TRAITS
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.timeout(1200)  # a failure is made smaller for up to 300 s
MAX_MODEL_LEN = 112
BLOCK_SIZE = 16
ACCEPTANCE = {"none": 0.0, "half": 0.5, "most": 0.9, "all": 1.0}


class SchedulerMachine(RuleBasedStateMachine):
    """Steps stay unread for up to one further plan, as in the engine's loop."""

    @initialize(
        depth=st.integers(0, 4),
        has_draft_head=st.sampled_from([True, True, True, False]),
        num_blocks=st.sampled_from([7, 8, 9, 10, 12, 16, 32]),  # one request of full length needs 7
        max_running=st.sampled_from([5, 3, 2, 8, 1]),
        prefill_chunk=st.sampled_from([16, 23, 48, 512]),
        mixed_prefill_chunk=st.sampled_from([None, 16, 23, 48]),
        idle_prefill_chunk=st.sampled_from([None, 16, 48]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        acceptance=st.sampled_from(sorted(ACCEPTANCE)),
        mixed_above_tokens=st.sampled_from([None, 0, 3, 9]),
        fairness=st.sampled_from([("auto", None), ("cpu", None), ("cpu", 1), ("cpu", 3)]),
    )
    def start(
        self,
        depth: int,
        has_draft_head: bool,
        num_blocks: int,
        max_running: int,
        prefill_chunk: int,
        mixed_prefill_chunk: int | None,
        idle_prefill_chunk: int | None,
        prefix_caching: bool,
        acceptance: str,
        mixed_above_tokens: int | None,
        fairness: tuple[Literal["auto", "cpu"], int | None],
    ) -> None:
        device, max_extra_rows = fairness
        self.config = EngineConfig(
            model_path="none",
            depth=depth,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            prefix_caching=prefix_caching,
            block_size=BLOCK_SIZE,
            mixed_above_tokens=mixed_above_tokens,
            device=device,
            max_extra_rows=max_extra_rows,
        )
        self.scheduler = Scheduler(
            self.config,
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            drafter=DRAFTER_TRAITS["mtp" if has_draft_head else "none"],
            prefill=PrefillPolicy(
                idle=idle_prefill_chunk or prefill_chunk,
                separate=prefill_chunk,
                mixed=mixed_prefill_chunk or prefill_chunk,
                mixed_above_tokens=mixed_above_tokens,
            ),
        )
        self.blocks = self.scheduler.state.blocks
        self.num_blocks = num_blocks
        self.uses_mtp = has_draft_head and depth > 0
        self.random = random.Random(repr((depth, num_blocks, acceptance)))
        self.share = ACCEPTANCE[acceptance]
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            has_draft_head=has_draft_head,
            max_depth=depth if has_draft_head else 0,
            accept=self._accept,
            is_published=self.blocks.is_published,
        )
        self.in_flight: deque[tuple[Plan, FakeHandle]] = deque()
        self.requests: dict[int, Request] = {}
        self.patterns: list[str | None] = []  # by request
        self.outputs: dict[int, list[int]] = {}
        self.finished: dict[int, FinishReason | None] = {}
        self.totals = Counter[str]()
        self.published: dict[int, tuple[object, ...]] = {}

    def _accept(self, num_valid: int) -> int:
        num_accepted = 0
        while num_accepted < num_valid and self.random.random() < self.share:
            num_accepted += 1
        return num_accepted

    # --- rules -----------------------------------------------------------------------------------------

    @rule(
        family=st.integers(0, 2),
        length=st.one_of(st.integers(1, 50), st.integers(1, 50), st.integers(1, MAX_MODEL_LEN - 1)),
        num_shared=st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 111]),
        max_tokens=st.one_of(st.integers(1, 9), st.integers(30, MAX_MODEL_LEN)),
        cap=st.sampled_from([None, None, None, 0, 1, 2]),
        stops=st.sampled_from([False, False, True]),
        salt=st.sampled_from(["", "", "other"]),
        priority=st.sampled_from([0, 0, 0, -1, 1, 1]),
        group_id=st.sampled_from([None, None, -1, -1, -2]),
        pattern=st.sampled_from([None, None, None, *PATTERNS]),
    )
    def add(
        self,
        family: int,
        length: int,
        num_shared: int,
        max_tokens: int,
        cap: int | None,
        stops: bool,
        salt: str,
        priority: int,
        group_id: int | None,
        pattern: str | None,
    ) -> None:
        request_id = len(self.requests)
        shared = [(family + 7 * i) % VOCAB_SIZE for i in range(min(num_shared, length))]
        own = [(request_id * 31 + i) % VOCAB_SIZE for i in range(length - len(shared))]
        request = Request(
            request_id=request_id,
            prompt_token_ids=shared + own,
            sampling=SamplingParams(seed=request_id % 3),
            max_tokens=min(max_tokens, MAX_MODEL_LEN - length),
            stop_token_ids=frozenset([END_ID] if pattern else range(5) if stops else []),
            max_draft_tokens=cap,
            cache_salt=salt,
            priority=priority,
            group_id=group_id,
            guide=None if pattern is None else new_guide(pattern),
        )
        self.patterns.append(pattern)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs[request_id] = []

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_due=st.sampled_from([False, False, True]))
    def abort(self, data: st.DataObject, is_due: bool) -> None:
        if not is_due:
            return
        request_id = data.draw(st.integers(max(0, len(self.requests) - 8), len(self.requests) - 1))
        self.scheduler.abort(request_id)
        self.finished.setdefault(request_id, FinishReason.ABORT)

    @rule(depth=st.integers(0, 7))
    def set_depth(self, depth: int) -> None:
        self.scheduler.set_depth(depth % (self.scheduler.state.max_depth + 1))

    @rule()
    def read(self) -> None:
        if self.in_flight:
            self._read_oldest()

    @rule(count=st.integers(1, 6))
    def launch(self, count: int) -> None:
        """Plans before the last step is read, then reads the one before: what the loop does on a GPU."""
        for _ in range(count):
            plan = self.scheduler.plan()
            if plan is not None:
                rows = sorted(r.row for r in self.requests.values() if r.row is not None)
                assert rows == list(range(self.scheduler.num_running)), "rows are tight in every step"
                self.in_flight.append((plan, self._run(plan)))
            assert plan is not None or self.in_flight or not self.scheduler.has_work, "nothing moves"
            while len(self.in_flight) > (plan is not None):
                self._read_oldest()
            self.published_blocks_are_complete_and_stay_as_they_are()

    def _run(self, plan: Plan) -> FakeHandle:
        """What the loop does: with guided rows it reads the step before between the halves, which may end any
        request."""
        if not plan.guided_rows:
            return self.runner.launch(plan)
        begun = self.runner.begin(plan)
        while self.in_flight:
            self._read_oldest()
        if self.random.random() < 0.1 and self.scheduler.state.running:
            request_id = self.random.choice(self.scheduler.state.running).request_id
            self.scheduler.abort(request_id)
            self.finished.setdefault(request_id, FinishReason.ABORT)
        return begun.finish(self.scheduler.fill_masks(plan, begun.drafts(), begun.buffer))

    @rule()
    def launch_and_read(self) -> None:
        """What the loop does on the CPU."""
        self.launch(1)
        self.read()

    def _read_oldest(self) -> None:
        plan, handle = self.in_flight.popleft()
        order = [chunk.request_id for chunk in plan.prefill if chunk.is_last]
        order += [request_id for request_id in plan.decode_request_ids if request_id is not None]
        events = self.scheduler.update(plan, handle.result())
        places = [order.index(event.request_id) for event in events]
        assert places == sorted(set(places)), "events come in the plan's order, one for each request"
        for event in events:
            assert event.token_ids
            assert event.request_id not in self.finished
            assert 0 <= event.num_accepted <= min(event.num_drafted, len(event.token_ids))
            self.outputs[event.request_id] += event.token_ids
            self.totals["generation"] += len(event.token_ids)
            self.totals["drafted"] += event.num_drafted
            self.totals["accepted"] += event.num_accepted
            if event.finish_reason is not None:
                self.finished[event.request_id] = event.finish_reason

    # --- what always holds -------------------------------------------------------------------------------

    @invariant()
    def published_blocks_are_complete_and_stay_as_they_are(self) -> None:
        now: dict[int, tuple[object, ...]] = {}
        for block_id in filter(self.blocks.is_published, range(self.num_blocks)):
            assert self.runner.is_complete(block_id, with_draft_head=self.uses_mtp), f"block {block_id}"
            now[block_id] = (self.blocks._keys[block_id], self.runner.snapshot(block_id))
            if block_id in self.published and self.published[block_id][0] == now[block_id][0]:
                assert self.published[block_id] == now[block_id], f"block {block_id} has changed"
        self.published = now

    @invariant()
    def every_block_has_as_many_owners_as_tables_that_name_it(self) -> None:
        owners = Counter(b for r in self.requests.values() for b in r.block_ids)
        assert [owners[b] for b in range(self.num_blocks)] == self.blocks._counts
        free = [*self.blocks._free, *self.blocks._idle]
        assert sorted(free) == [b for b in range(self.num_blocks) if not owners[b]]

    @invariant()
    def rows_are_held_by_what_runs(self) -> None:
        rows = [r.row for r in self.requests.values() if r.row is not None]
        assert len(set(rows)) == len(rows) == self.scheduler.num_running <= self.config.max_running

    @invariant()
    def both_queues_are_in_order_of_priority_then_arrival(self) -> None:
        queues = self.scheduler.state.running, self.scheduler.state.waiting
        for queue in queues:
            order = [(r.priority, r.request_id) for r in queue]
            assert order == sorted(order)
        assert sorted(r.request_id for q in queues for r in q) == sorted(self.scheduler.state.requests)

    @invariant()
    def no_equal_that_came_later_runs_in_its_place(self) -> None:
        """Of those that one priority has and that are alone in their group, all that run came before all that
        wait."""
        queues = self.scheduler.state.running, self.scheduler.state.waiting
        order = [r for queue in queues for r in queue if r.group_id is None]
        for priority in {r.priority for r in order}:
            arrivals = [r.request_id for r in order if r.priority == priority]
            assert arrivals == sorted(arrivals)

    @invariant()
    def the_queue_knows_who_runs(self) -> None:
        queue, running = self.scheduler.state.waiting, self.scheduler.state.running
        by_group = Counter(r.group for r in running)
        assert queue.num_extra == by_group.total() - len(by_group)
        for group in by_group:
            ranks = [queue.turn(r).rank for r in running if r.group == group]
            assert ranks == list(range(1, by_group[group] + 1)) or queue.num_extra == 0
        known = {r.group for r in [*running, *queue]}
        assert set(queue._groups) == known

    @invariant()
    def outputs_so_far_are_those_of_the_oracle(self) -> None:
        for request_id, output in self.outputs.items():
            request = self.requests[request_id]
            if request.request_id not in self.finished:
                assert request.output_token_ids == output
                assert len(output) < request.max_tokens

    def teardown(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.launch(1)
        self.every_block_has_as_many_owners_as_tables_that_name_it()
        stats = self.scheduler.snapshot()
        assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
        for request_id, request in self.requests.items():
            pattern = self.patterns[request_id]
            expected = oracle_output(
                request.prompt_token_ids,
                request.max_tokens,
                request.stop_token_ids,
                request.sampling.seed,
                None if pattern is None else new_guide(pattern),
            )
            output, reason = self.outputs[request_id], self.finished[request_id]
            if reason is FinishReason.ABORT:
                assert output == expected[: len(output)]
            else:
                assert output == expected
                is_stop = output[-1] in request.stop_token_ids
                assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
        self._check_counters()

    def _check_counters(self) -> None:
        stats = self.scheduler.snapshot()
        by_size = stats.row_rounds_by_emitted_tokens
        assert stats.num_generation_tokens == self.totals["generation"]
        assert stats.num_draft_tokens == sum(stats.draft_tokens_per_position) == self.totals["drafted"]
        assert stats.num_accepted_tokens == sum(stats.accepted_tokens_per_position) == self.totals["accepted"]
        num_first = stats.num_generation_tokens - sum(size * count for size, count in by_size.items())
        assert num_first <= len(self.requests) + stats.num_preemptions
        assert sum(stats.finished_by_reason.values()) == len(self.requests)


def settings_of(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples, stateful_step_count=100, derandomize=True, deadline=None, database=None
    )


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings_of(15)


@pytest.mark.long
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings_of(150)
