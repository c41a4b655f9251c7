"""Who runs in the next step: admission, blocks, prefill chunks, preemption, then one decode round for all.

Step n + 1 is planned before the result of step n is read, so what a row may have done meanwhile is bounded
from above. Knows ids and numbers; no tensors, no text. The clock tells how long a request queued, no more.

    N      tokens known: prompt + output
    L      tokens in the KV cache: N - 1 once prefilled, the last one is not in it
    limit  prompt + max_tokens - 1: no position at or beyond it is computed or written
"""

from __future__ import annotations

import bisect
import copy
import logging
import math
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from headway.engine.protocol.config import DEFAULT_PREFILL_CHUNK, LATE_KEYS, MAX_MIXED_TOKENS, EngineConfig
from headway.engine.protocol.errors import LogitsError, describe_fault
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import STEP_TOKEN_BOUNDS, EngineStats
from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.limits import Limits
from headway.engine.scheduling.orders import block_grant, history_of, next_chunk, row_of, row_setup
from headway.engine.scheduling.plan import Plan, PrefillChunk, StepResult, TokenHistory, is_far, is_near
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.queue import Queue
from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.rows import RowTable
from headway.engine.scheduling.updates import Given, News, fault_event, first_tokens, round_tokens

# For so many tokens beyond its next round a row takes blocks, if there are enough. An H200 starts each kernel of a round
# 0.3 us later where one was launched by itself just before, as grants are.
SPARE_TOKENS = 128
# On a CPU a first token waits for a round of so many rows, which does not take long.
SHORT_ROUND_ROWS = 4
_BROKEN_LOGITS = (
    "the model produced NaN or infinite logits for this request, at {}; other requests are not affected. A weight that "
    "these tokens need is broken, or a value exceeds what --dtype can hold"
)

P = ParamSpec("P")
Admitted = tuple[Request, TokenHistory | None]
logger = logging.getLogger(__name__)


class Scheduler:
    """Mutable: owns the requests, the blocks and the rows; called by the loop only.

    At most one step may be unread when `plan` is called. `_running` is in order of precedence (priority, then
    arrival). Admission takes the first that waits, preemption the last that runs, both in the order of their turns: see
    `Queue`. Who runs gives way when a row before it needs its blocks; to one that waits only a further row of a group
    gives way, if that one's group has no row.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        has_mtp: bool,
        model_identity: str,
        kv_dtype: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert num_blocks * config.block_size >= max_model_len, (
            f"{num_blocks} blocks of {config.block_size} tokens cannot hold one request of {max_model_len}"
        )
        self._config = config
        self._clock = clock
        self._limits = Limits(max_model_len, vocab_size)
        self._prefill_chunk = config.prefill_chunk or DEFAULT_PREFILL_CHUNK
        self._mixed_prefill_chunk = config.mixed_prefill_chunk or self._prefill_chunk
        self._late_prefill_chunk = config.late_prefill_chunk or self._mixed_prefill_chunk
        self._idle_prefill_chunk = config.idle_prefill_chunk or self._prefill_chunk
        self._max_extra_rows = config.max_extra_rows or config.num_rows
        self._num_blocks = num_blocks
        self._has_mtp = has_mtp
        self._depth = config.depth if has_mtp else 0
        self._holds_rounds = self._has_held_round = False
        self._step = 0
        self._fault_events: list[TokenEvent] = []
        self._requests: dict[int, Request] = {}
        self._waiting = Queue(config.max_waiting)
        self._num_taken_in = 0
        self._running: list[Request] = []
        self._broken_block_ids: list[int] = []
        self._rows = RowTable(config.num_rows)
        self._blocks = BlockAllocator(num_blocks)
        self._prefixes = PrefixCache(
            self._blocks,
            block_size=config.block_size,
            model_identity=model_identity,
            kv_dtype=kv_dtype,
            is_enabled=config.prefix_caching,
        )
        self._stats = EngineStats(
            num_kv_blocks=num_blocks,
            kv_block_size=config.block_size,
            num_steps_by_tokens=[0] * (len(STEP_TOKEN_BOUNDS) + 1),
            draft_tokens_per_position=[0] * self._depth,
            accepted_tokens_per_position=[0] * self._depth,
        )

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def snapshot(self) -> EngineStats:
        """A copy of the counters as they stand."""
        self._stats.num_requests_running = len(self._running)
        self._stats.num_requests_waiting = len(self._waiting)
        self._stats.num_kv_blocks_used = self._blocks.num_used
        self._stats.num_kv_blocks_cached = self._blocks.num_cached
        return copy.deepcopy(self._stats)

    def set_depth(self, depth: int) -> None:
        """Drafts a round from the next step on, at most those of the configuration. Only while no request is known.

        Not with prefix caching: what is computed at depth 0 leaves the MTP layer's part of its blocks empty.
        """
        assert not self._requests, f"{len(self._requests)} requests are in flight"
        assert not self._config.prefix_caching, "a prefix found at another depth would lack its MTP keys"
        assert 0 <= depth <= len(self._stats.draft_tokens_per_position), f"depth is {depth}"
        self._depth = depth

    def hold_rounds(self) -> None:
        """Until they are released prompts are computed, as if nobody decoded, and no round is planned: who measures rounds
        wants all rows to begin together."""
        self._holds_rounds = True

    def release_rounds(self) -> None:
        """From the next step on rounds are planned again."""
        self._holds_rounds = False

    def add(self, request: Request) -> None:
        """Puts a request in the queue, behind its equals. Raises RequestError, or QueueFullError.

        The caller has cut max_tokens so that prompt + max_tokens <= max_model_len; only a prompt that is scored,
        of which the one generated token is not shown, may fill the context alone.
        """
        self._limits.check(request)
        self._waiting.check_room(request)
        assert request.max_tokens >= 1, f"max_tokens is {request.max_tokens}"
        max_model_len = self._limits.max_model_len
        fits = request.limit < max_model_len or request.max_tokens == 1
        assert fits, f"limit {request.limit} of {max_model_len} tokens"
        assert request.request_id not in self._requests, f"request id {request.request_id} is taken"
        request.arrival_seconds = self._clock()
        request.arrival = self._num_taken_in
        self._num_taken_in += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request at any state; what a step in flight adds to it is dropped. It counts under `reason`."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)

    def count_fault(self, request_id: int, what: str) -> None:
        """A request ended by a fault of ours; its event waits for `drain_faults`."""
        self._stats.count_finished(FinishReason.ERROR.value)
        self._fault_events.append(fault_event(request_id, what))

    def drain_faults(self) -> list[TokenEvent]:
        """Events of requests that faults have ended since the last call."""
        events, self._fault_events = self._fault_events, []
        return events

    # --- plan ------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute before a step in flight is read."""
        grown = self._grow_rows()
        self._make_room()
        admitted = self._admit_waiting()
        if not any(r.status is Status.PREFILLING or self._can_decode(r) for r in self._running):
            return None
        moves = self._rows.compact()
        released = self._rows.drain_released()  # a row released from here on is padding until the next step
        setups = tuple(row_setup(r, history, self._depth_cap(r)) for r, history in admitted)
        served = [(r, first) for r, first in grown if r.row is not None]  # others were preempted later on
        grants = tuple(block_grant(r, first) for r, first in [*served, *((r, 0) for r, _ in admitted)])
        chunks = self._take_chunks()
        depth, decode_request_ids, is_mixed = self._join_round(chunks)
        self._step += 1
        self._stats.num_steps += 1
        return Plan(
            self._step,
            depth,
            released,
            moves,
            setups,
            grants,
            chunks,
            decode_request_ids,
            fills_drafts=self._depth > 0,
            is_mixed=is_mixed,
            wiped_block_ids=self._drain_broken_blocks(),
        )

    def _drain_broken_blocks(self) -> tuple[int, ...]:
        """Blocks of requests that ended by broken logits since the last call."""
        broken, self._broken_block_ids = self._broken_block_ids, []
        return tuple(broken)

    def _grow_rows(self) -> list[tuple[Request, int]]:
        """Blocks for the next round of each row that lacks some, in order: (request, index of its first new block).

        Who was served may still be preempted for one that comes later, but has more right to its blocks.
        """
        grown: list[tuple[Request, int]] = []
        for request in list(self._running):
            if self._can_decode(request):
                self._contain(self._grow_row, request, grown)
        return grown

    def _grow_row(self, request: Request, grown: list[tuple[Request, int]]) -> None:
        """Nothing where the request lacks none, or was itself the last and had to give way."""
        first = len(request.block_ids)
        missing = self._num_blocks_needed(request, request.num_computed) - first
        if missing <= 0:
            return
        while (block_ids := self._allocate(missing + self._num_spare(request, missing))) is None:
            victim = max(self._running, key=self._waiting.turn)
            self._preempt(victim)
            if victim is request:
                return
        request.block_ids += block_ids
        grown.append((request, first))

    def _num_blocks_needed(self, request: Request, length: int) -> int:
        """For one more round, if every round in flight keeps all its drafts.

        With depth 3 and one round in flight from length 10 the row may have come to 14; the next round
        writes positions 14 .. 17, so 18 tokens must have their place, or `limit` if that is less.
        """
        upper_bound = length + request.num_rounds_in_flight * (self._depth + 1)
        num_tokens = min(request.limit, upper_bound + self._depth + 1)
        return -(-num_tokens // self._config.block_size)

    def _num_spare(self, request: Request, missing: int) -> int:
        """How many blocks it takes before it needs them, while half of the cache is left, known prefixes that nobody uses
        among it: so many grants less. Whoever lacks blocks takes them back."""
        block_size = self._config.block_size
        num_wanted = -(-request.limit // block_size) - len(request.block_ids) - missing
        num_left = self._blocks.num_free - missing - self._num_blocks // 2
        return max(min(SPARE_TOKENS // block_size, num_wanted, num_left), 0)

    def _allocate(self, count: int) -> list[int] | None:
        block_ids = self._blocks.allocate(count)
        if block_ids is None and self._take_back_spares():
            block_ids = self._blocks.allocate(count)
        return block_ids

    def _take_back_spares(self) -> bool:
        """Whether any row had some. No round in flight comes so far, and a row reaches what its table still says of them only
        when a later grant has replaced it."""
        has_freed = False
        for request in self._running:
            is_prefilling = request.status is Status.PREFILLING
            length = request.num_tokens if is_prefilling else request.num_computed
            num_needed = self._num_blocks_needed(request, length)
            spare = request.block_ids[num_needed:]
            if spare:
                del request.block_ids[num_needed:]
                self._blocks.free(spare)
                has_freed = True
        return has_freed

    def _preempt(self, request: Request) -> None:
        """Back to its place in the queue; all its tokens so far are prefilled again."""
        self._running.remove(request)
        self._waiting.note_end(request)
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.has_draft_gap = False
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._waiting.append(request)

    def _make_room(self) -> None:
        """Rows and blocks for groups that have no row, as far as groups with several can give them. Before any request is
        admitted, so that none that the device does not know yet has to move."""
        if not self._waiting or self._waiting.num_extra == 0:
            return
        budget = self._prefill_budget()
        num_blocks = 0
        for num_rows, request in enumerate(list(self._waiting.newcomers()), start=1):
            if request.is_in_flight or self._num_tokens_before(request) >= budget:
                return
            num_blocks += -(-(request.num_tokens + self._depth + 1) // self._config.block_size)
            while self._rows.num_free < num_rows or not self._has_blocks(num_blocks):
                extra = [r for r in self._running if self._may_give_way(r, request.priority)]
                if not extra:
                    return
                self._preempt(max(extra, key=self._waiting.turn))

    def _has_blocks(self, count: int) -> bool:
        return count <= self._blocks.num_free or (self._take_back_spares() and count <= self._blocks.num_free)

    def _may_give_way(self, request: Request, priority: int) -> bool:
        """To a request of that priority, whose group has no row."""
        turn = self._waiting.turn(request)
        return turn.rank > 1 and turn.priority >= priority

    def _admit_waiting(self) -> list[Admitted]:
        """Takes them in the order of their turns as long as this step has room for its tokens behind those of who comes
        before."""
        admitted: list[Admitted] = []
        if not self._waiting or self._rows.is_full:
            return admitted
        budget = self._prefill_budget()
        while (request := self._next_to_admit()) is not None:
            if self._num_tokens_before(request) >= budget:
                break
            if not request.is_in_flight:
                self._contain(self._try_admit, request, admitted)
            if request.status is Status.WAITING:
                break  # nobody overtakes it
        return admitted

    def _next_to_admit(self) -> Request | None:
        if self._rows.is_full:
            return None
        return self._waiting.first(allows_extra=self._waiting.num_extra < self._max_extra_rows)

    def _num_tokens_before(self, request: Request) -> int:
        """Still to be prefilled of running requests whose turn is before its own."""
        turn = self._waiting.turn(request)
        return sum(
            running.num_tokens - running.num_computed
            for running in self._running
            if running.status is Status.PREFILLING and self._waiting.turn(running) < turn
        )

    def _try_admit(self, request: Request, admitted: list[Admitted]) -> None:
        """The request goes on waiting if there are not enough blocks."""
        history = history_of(request)
        if not self._take_blocks(request):
            return
        self._waiting.remove(request)
        request.status = Status.PREFILLING
        bisect.insort(self._running, request, key=lambda r: r.precedence)
        self._rows.take(request)
        self._waiting.note_start(request)
        admitted.append((request, history))
        if request.num_preemptions == 0:
            request.queue_seconds = self._clock() - request.arrival_seconds
            self._stats.num_prompt_tokens += len(request.prompt_token_ids)
            request.num_prompt_cached = request.num_cached
            self._stats.num_cached_prompt_tokens += request.num_cached
            if self._config.prefix_caching and not request.scores_prompt:
                self._stats.num_prefix_query_tokens += len(request.prompt_token_ids)

    def _take_blocks(self, request: Request) -> bool:
        """Blocks for all its tokens, a first round and perhaps some more: shared where the prefix cache has them, else new.

        A prompt that is to be scored is computed from its first token on.
        """
        hits = [] if request.scores_prompt else self._prefixes.match(request)
        self._blocks.share(hits)  # before new ones are taken, which may evict
        request.block_ids = hits
        missing = self._num_blocks_needed(request, request.num_tokens) - len(hits)
        own = self._allocate(missing + self._num_spare(request, missing))
        if own is None:
            self._free_blocks(request)
            return False
        request.block_ids = hits + own
        request.num_cached = request.num_computed = len(hits) * self._config.block_size
        return True

    def _depth_cap(self, request: Request) -> int:
        cap = request.max_draft_tokens
        return self._depth if cap is None else min(self._depth, cap)

    def _prefill_budget(self) -> int:
        """Prompt tokens of one step: more while no stream waits for it, or where they would not share a round's pass anyway."""
        decoding = [request for request in self._running if self._can_decode(request)]
        if not decoding:
            return self._idle_prefill_chunk
        first = next(iter(self._prefilling()), None)
        num_keys = 0 if first is None else first.num_computed
        if is_far(num_keys) or not self._takes_prompts(decoding):
            return self._prefill_chunk
        return self._late_prefill_chunk if num_keys >= LATE_KEYS else self._mixed_prefill_chunk

    def _prefilling(self) -> list[Request]:
        """Running requests whose prompts are not computed yet, in the order of their turns."""
        prefilling = [request for request in self._running if request.status is Status.PREFILLING]
        return sorted(prefilling, key=self._waiting.turn)

    def _take_chunks(self) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        prefilling = self._prefilling()
        budget = self._prefill_budget() if prefilling else 0
        for request in prefilling:
            if budget > 0:
                num_before = len(chunks)
                self._contain(self._take_chunk, request, budget, chunks)
                budget -= sum(len(chunk.token_ids) for chunk in chunks[num_before:])
        return tuple(chunks)

    def _take_chunk(self, request: Request, budget: int, chunks: list[PrefillChunk]) -> None:
        follows_hit = self._has_mtp and 0 < request.num_computed == request.num_cached
        last_hit = request.num_computed // self._config.block_size - 1
        chunk = next_chunk(request, budget, request.block_ids[last_hit] if follows_hit else None)
        chunks.append(chunk)
        request.num_computed += len(chunk.token_ids)
        request.num_chunks_in_flight += 1
        if chunk.is_last:
            request.status = Status.RUNNING

    def _can_decode(self, request: Request) -> bool:
        """False while rounds are held, and when it is certain to reach its limit: a round in flight adds one token at the
        least."""
        is_below_limit = request.num_computed + request.num_rounds_in_flight < request.limit
        return request.status is Status.RUNNING and is_below_limit and not self._holds_rounds

    def _takes_prompts(self, others: list[Request]) -> bool:
        """Whether the round of these rows is large, so that prompts may share its forward pass.

        Beside a small round they do not: its rows are computed in the same way, to the last bit, whoever else comes. Nor
        beside rounds of rare kinds, or as many graphs more would be captured of them.
        """
        above = self._config.mixed_above_tokens
        if above is None or len(others) * (self._depth + 1) <= above:
            return False
        is_deep = any(self._depth_cap(r) == self._depth for r in others)
        is_plain = not any(
            r.sampling.adjusts_logits or r.sampling.num_logprobs is not None for r in self._running
        )
        return is_deep and is_plain

    def _mixes(self, chunks: tuple[PrefillChunk, ...], others: list[Request]) -> bool:
        """Whether the chunks share the forward pass of the round of the others; the rows that start then miss it."""
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        is_few = 0 < num_tokens <= MAX_MIXED_TOKENS
        return is_few and is_near(chunks) and self._takes_prompts(others)

    def _join_round(self, chunks: tuple[PrefillChunk, ...]) -> tuple[int, tuple[int | None, ...], bool]:
        """(depth, request ids by row up to the last row that takes part, whether it is mixed with the chunks and
        their rows take no part). Nobody drafts deeper than someone may."""
        decoding = [request for request in self._running if self._can_decode(request)]
        prefilled = {chunk.request_id for chunk in chunks}
        others = [request for request in decoding if request.request_id not in prefilled]
        is_mixed = self._mixes(chunks, others)
        if self._gives_first_tokens_first(chunks, others):
            return self._depth, (), False
        by_row = {row_of(request): request for request in (others if is_mixed else decoding)}
        if not by_row:
            return self._depth, (), is_mixed
        depth = max(map(self._depth_cap, by_row.values()))
        for request in by_row.values():
            request.num_rounds_in_flight += 1
        self._stats.count_round(depth)
        rows = range(max(by_row) + 1)
        return depth, tuple(by_row[row].request_id if row in by_row else None for row in rows), is_mixed

    def _gives_first_tokens_first(self, chunks: tuple[PrefillChunk, ...], others: list[Request]) -> bool:
        """Whether the round of the others waits for the next step, since a prompt ends in this one and a CPU's results come
        all at once. Not twice in a row."""
        is_parted = self._config.device == "cpu" and self._config.mixed_above_tokens is None
        has_first = is_parted and len(others) > SHORT_ROUND_ROWS and any(chunk.is_last for chunk in chunks)
        self._has_held_round = has_first and not self._has_held_round
        return self._has_held_round

    # --- update ----------------------------------------------------------------------------------------

    def update(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Takes in what a step gave, steps in the order of their plans. Faults: see `drain_faults`.

        One event for each request that got tokens, in the plan's order: prefills, then rows. Output ends
        with the first stop token; what came behind it, or for a request that has ended, is dropped.
        """
        self._stats.count_work(result.seconds, result.num_graph_replays)
        num_generated_before = self._stats.num_generation_tokens
        for request_id, what in result.faults:
            if (request := self._requests.get(request_id)) is not None:
                self._end_by_fault(request, what)
        news: dict[int, News] = {}
        self._read_prefill(plan, result, news)
        self._read_round(plan, result, news)
        num_generated = self._stats.num_generation_tokens - num_generated_before
        self._stats.count_step(sum(len(chunk.token_ids) for chunk in plan.prefill) + num_generated)
        events: list[TokenEvent] = []
        for request_id, entry in news.items():
            if (request := self._requests.get(request_id)) is not None:
                self._contain(self._report, request, entry, events)
        return events

    def _read_prefill(self, plan: Plan, result: StepResult, news: dict[int, News]) -> None:
        first = first_tokens(plan, result)
        scores = result.prompt_logprobs or [None] * len(plan.prefill)
        for chunk, chunk_scores in zip(plan.prefill, scores, strict=True):
            request = self._requests.get(chunk.request_id)
            if request is not None:
                self._contain(self._read_chunk, request, chunk, chunk_scores)
                if chunk.is_last and request.status is not Status.FINISHED:
                    self._contain(self._append, request, first[request.request_id], news)

    def _read_chunk(self, request: Request, chunk: PrefillChunk, scores: TokenLogprobs | None) -> None:
        request.num_chunks_in_flight -= 1
        if scores is not None:
            if any(map(math.isnan, scores.logprobs)):
                raise LogitsError(_BROKEN_LOGITS.format("its prompt"))
            earlier = request.prompt_logprobs if chunk.start > 0 else []
            request.prompt_logprobs = [*earlier, scores]
        if request.block_ids:
            self._prefixes.publish(request, chunk.start + len(chunk.token_ids))

    def _read_round(self, plan: Plan, result: StepResult, news: dict[int, News]) -> None:
        for request_id, given in round_tokens(plan, result):
            request = self._requests.get(request_id)
            has_ended = request_id in news and news[request_id].finish_reason is not None
            if request is not None and not has_ended:
                self._contain(self._read_row, request, plan.depth, given, news)

    def _read_row(self, request: Request, depth: int, given: Given, news: dict[int, News]) -> None:
        """num_accepted counts drafts that stay in the output: a stop token cuts off those behind it."""
        length = request.num_tokens - 1
        num_drafted = min(depth, self._depth_cap(request), request.limit - length - 1)
        num_emitted = len(given.token_ids)
        assert 1 <= num_emitted <= num_drafted + 1, (
            f"request {request.request_id} at length {length} with {num_drafted} drafts emitted {given.token_ids}"
        )
        num_kept = self._append(request, given, news)
        num_accepted = min(num_emitted - 1, num_kept)
        entry = news[request.request_id]
        entry.num_drafted += num_drafted
        entry.num_accepted += num_accepted
        entry.draft_start = len(entry.token_ids) - num_kept
        self._stats.count_row_round(num_drafted=num_drafted, num_accepted=num_accepted, num_emitted=num_kept)
        request.num_rounds_in_flight -= 1
        if request.status is Status.RUNNING:
            request.num_computed = request.num_tokens - 1
            request.has_draft_gap |= depth == 0 < self._depth
            if not request.has_draft_gap:
                self._prefixes.publish(request, self._num_final(length, request.num_computed))

    def _num_final(self, start: int, end: int) -> int:
        """How many tokens have all their KV, never to change, after a round from length start to end.

        The round's MTP pass saw true pairs up to slot start; what it wrote beyond came from drafts, and
        the next round's pass writes there again. Slots 0 .. start are start + 1 tokens.
        """
        return min(end, start + 1) if self._depth > 0 else end

    def _append(self, request: Request, given: Given, news: dict[int, News]) -> int:
        """Adds tokens up to the first that ends the request; returns how many were kept."""
        kept = news.setdefault(request.request_id, News()).add(request, given)
        if any(token_id < 0 for token_id in kept):
            raise LogitsError(_BROKEN_LOGITS.format(f"token {request.num_tokens + 1:,} of its context"))
        request.output_token_ids += kept
        self._stats.num_generation_tokens += len(kept)
        return len(kept)

    def _report(self, request: Request, entry: News, events: list[TokenEvent]) -> None:
        event = entry.event(request.request_id)
        if entry.finish_reason is not None:
            self._finish(request, entry.finish_reason)
        events.append(event)

    # --- endings ---------------------------------------------------------------------------------------

    def _contain(
        self,
        work: Callable[Concatenate[Request, P], object],
        request: Request,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Does work for one request; a fault in it ends that request alone."""
        try:
            work(request, *args, **kwargs)
        except LogitsError as error:
            logger.error("request %d ends: %s", request.request_id, error)
            self._stats.num_nan_logits += 1
            block_ids = request.block_ids
            self._blocks.unpublish(block_ids)
            self._end_by_fault(request, str(error))
            # What others share fails them, too, or is sound.
            self._broken_block_ids += [
                block_id for block_id in block_ids if not self._blocks.is_used(block_id)
            ]
        except Exception as error:
            logger.exception("request %d ends because of a fault", request.request_id)
            self._end_by_fault(request, describe_fault(error))

    def _end_by_fault(self, request: Request, what: str) -> None:
        self._finish(request, FinishReason.ERROR)
        self._fault_events.append(fault_event(request.request_id, what))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._waiting.note_end(request)
        self._release(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._stats.count_finished(reason.value)
        try:
            self._prefixes.forget(request)  # the last, for only what is its own is left
        except Exception:
            logger.exception("what the prefix cache noted of request %d stays", request.request_id)

    def _release(self, request: Request) -> None:
        """Row and blocks are free at once: work launched later runs after all that still writes to them."""
        if request.row is not None:
            self._rows.release(request)
        self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        block_ids, request.block_ids = request.block_ids, []
        self._blocks.free(block_ids)
