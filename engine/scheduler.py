"""Who runs in the next step: admission, blocks, prefill chunks, preemption, then one decode round for all.

Step n + 1 is planned before the result of step n is read, so what a row may have done meanwhile is bounded
from above. Knows ids and numbers; no tensors, no text, no clock.

    N      tokens known: prompt + output
    L      tokens in the KV cache: N - 1 once prefilled, the last one is not in it
    limit  prompt + max_tokens - 1: no position at or beyond it is computed or written
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

from headway.engine.batch import BlockGrant, Plan, PrefillChunk, RowSetup, StepResult
from headway.engine.cache.blocks import BlockAllocator
from headway.engine.cache.prefix import PrefixCache
from headway.engine.config import EngineConfig
from headway.engine.errors import QueueFullError
from headway.engine.limits import Limits
from headway.engine.mailbox import TokenEvent
from headway.engine.request import FinishReason, Request, Status
from headway.engine.rows import RowTable
from headway.engine.stats import EngineStats


@dataclass(slots=True)
class _News:
    """What one step added to one request. Mutable: prefill and round of a step both add to it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0


class Scheduler:
    """Mutable: owns the requests, the blocks and the rows; called by the loop only.

    At most one step may be unread when `plan` is called. `_running` and `_waiting` are both in order of
    arrival, and all that run came before all that wait: admission takes the oldest that waits,
    preemption the newest that runs.
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
    ) -> None:
        assert num_blocks * config.block_size >= max_model_len, (
            f"{num_blocks} blocks of {config.block_size} tokens cannot hold one request of {max_model_len}"
        )
        self._config = config
        self._limits = Limits(max_model_len, vocab_size)
        self._num_blocks = num_blocks
        self._has_mtp = has_mtp
        self._depth = config.depth if has_mtp else 0
        self._step = 0
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rows = RowTable(config.max_running)
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

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue. Raises RequestError, or QueueFullError.

        The caller has cut max_tokens so that prompt + max_tokens <= max_model_len.
        """
        self._limits.check(request)
        if len(self._waiting) >= self._config.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting):,} requests wait, the limit is {self._config.max_waiting:,} "
                "(max_waiting); try again later",
                code="queue_full",
            )
        assert request.max_tokens >= 1, f"max_tokens is {request.max_tokens}"
        max_model_len = self._limits.max_model_len
        assert request.limit < max_model_len, f"limit {request.limit} of {max_model_len} tokens"
        assert request.request_id not in self._requests, f"request id {request.request_id} is taken"
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: int) -> None:
        """Ends a request at any state; what a step in flight adds to it is dropped."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)

    # --- plan ------------------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute before a step in flight is read."""
        grown = self._grow_rows()
        admitted = self._admit_waiting()
        if not any(r.status is Status.PREFILLING or self._can_decode(r) for r in self._running):
            return None
        moves = self._rows.compact()
        chunks = self._take_chunks()
        decode_request_ids = self._join_round()
        self._step += 1
        self._stats.num_steps += 1
        return Plan(
            step=self._step,
            depth=self._depth,
            released_rows=self._rows.drain_released(),
            moves=moves,
            setups=tuple(self._setup(request) for request in admitted),
            grants=tuple(_grant(r, first) for r, first in [*grown, *((r, 0) for r in admitted)]),
            prefill=chunks,
            decode_request_ids=decode_request_ids,
        )

    def _grow_rows(self) -> list[tuple[Request, int]]:
        """Blocks for the next round of each row, the oldest first: (request, index of its first new block).

        Whoever is preempted on the way is newer than all that were served so far.
        """
        grown: list[tuple[Request, int]] = []
        for request in list(self._running):
            if self._can_decode(request):
                first = len(request.block_ids)
                if self._grow(request) and len(request.block_ids) > first:
                    grown.append((request, first))
        return grown

    def _grow(self, request: Request) -> bool:
        """False when the request itself was the newest and had to give way."""
        missing = self._num_blocks_needed(request, request.num_computed) - len(request.block_ids)
        while missing > 0:
            block_ids = self._blocks.allocate(missing)
            if block_ids is not None:
                request.block_ids += block_ids
                return True
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _num_blocks_needed(self, request: Request, length: int) -> int:
        """For one more round, if every round in flight keeps all its drafts.

        With depth 3 and one round in flight from length 10 the row may have come to 14; the next round
        writes positions 14 .. 17, so 18 tokens must have their place, or `limit` if that is less.
        """
        upper_bound = length + request.num_rounds_in_flight * (self._depth + 1)
        num_tokens = min(request.limit, upper_bound + self._depth + 1)
        return -(-num_tokens // self._config.block_size)

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue; all its tokens so far are prefilled again."""
        popped = self._running.pop()
        assert popped is request, f"request {request.request_id} is not the newest"
        self._release(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._waiting.appendleft(request)

    def _admit_waiting(self) -> list[Request]:
        """Takes from the queue's front as long as this step has room for prefill tokens."""
        admitted: list[Request] = []
        budget = self._config.prefill_chunk - sum(
            r.num_tokens - r.num_computed for r in self._running if r.status is Status.PREFILLING
        )
        while budget > 0 and self._waiting and not self._rows.is_full:
            request = self._waiting[0]
            if request.is_in_flight or not self._take_blocks(request):
                break  # nobody overtakes it
            self._admit(self._waiting.popleft())
            admitted.append(request)
            budget -= request.num_tokens - request.num_computed
        return admitted

    def _take_blocks(self, request: Request) -> bool:
        """Blocks for all its tokens and a first round: shared where the prefix cache has them, else new."""
        hits = self._prefixes.match(request)
        self._blocks.share(hits)  # before new ones are taken, which may evict
        own = self._blocks.allocate(self._num_blocks_needed(request, request.num_tokens) - len(hits))
        if own is None:
            self._blocks.free(hits)
            return False
        request.block_ids = hits + own
        request.num_cached = request.num_computed = len(hits) * self._config.block_size
        return True

    def _admit(self, request: Request) -> None:
        request.status = Status.PREFILLING
        self._rows.take(request)
        self._running.append(request)
        if request.num_preemptions == 0:
            self._stats.num_prompt_tokens += len(request.prompt_token_ids)
            self._stats.num_cached_prompt_tokens += request.num_cached

    def _setup(self, request: Request) -> RowSetup:
        return RowSetup(_row(request), request.sampling, request.limit, self._depth_cap(request))

    def _depth_cap(self, request: Request) -> int:
        cap = request.max_draft_tokens
        return self._config.depth if cap is None else min(self._config.depth, cap)

    def _take_chunks(self) -> tuple[PrefillChunk, ...]:
        chunks: list[PrefillChunk] = []
        budget = self._config.prefill_chunk
        for request in self._running:
            if request.status is Status.PREFILLING and budget > 0:
                chunks.append(self._take_chunk(request, budget))
                budget -= len(chunks[-1].token_ids)
        return tuple(chunks)

    def _take_chunk(self, request: Request, budget: int) -> PrefillChunk:
        start = request.num_computed
        end = min(start + budget, request.num_tokens)
        follows_hit = self._has_mtp and 0 < start == request.num_cached
        hidden_block_id = request.block_ids[start // self._config.block_size - 1] if follows_hit else None
        is_last = end == request.num_tokens
        request.num_computed = end
        request.num_chunks_in_flight += 1
        if is_last:
            request.status = Status.RUNNING
        token_ids = tuple(request.token_ids(start, end))
        return PrefillChunk(request.request_id, _row(request), start, token_ids, hidden_block_id, is_last)

    def _can_decode(self, request: Request) -> bool:
        """False when it is certain to reach its limit: a round in flight adds one token at the least."""
        is_below_limit = request.num_computed + request.num_rounds_in_flight < request.limit
        return request.status is Status.RUNNING and is_below_limit

    def _join_round(self) -> tuple[int | None, ...]:
        """Request ids by row, up to the last row that takes part."""
        by_row = {_row(r): r.request_id for r in self._running if self._can_decode(r)}
        if not by_row:
            return ()
        for request_id in by_row.values():
            self._requests[request_id].num_rounds_in_flight += 1
        self._stats.count_round(self._depth)
        return tuple(by_row.get(row) for row in range(max(by_row) + 1))

    # --- update ----------------------------------------------------------------------------------------

    def update(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Takes in what a step gave, steps in the order of their plans.

        One event for each request that got tokens, in the plan's order: prefills, then rows. Output ends
        with the first stop token; what came behind it, or for a request that has ended, is dropped.
        """
        news: dict[int, _News] = {}
        self._read_prefill(plan, result, news)
        self._read_round(plan, result, news)
        return [
            TokenEvent(request_id, n.token_ids, n.finish_reason, n.num_drafted, n.num_accepted)
            for request_id, n in news.items()
        ]

    def _read_prefill(self, plan: Plan, result: StepResult, news: dict[int, _News]) -> None:
        last_ids = [chunk.request_id for chunk in plan.prefill if chunk.is_last]
        first_tokens = dict(zip(last_ids, result.first_token_ids, strict=True))
        for chunk in plan.prefill:
            request = self._requests.get(chunk.request_id)
            if request is None:
                continue
            request.num_chunks_in_flight -= 1
            if request.block_ids:
                self._prefixes.publish(request, chunk.start + len(chunk.token_ids))
            if chunk.is_last:
                self._append(request, (first_tokens[chunk.request_id],), news)
                self._finish_if_done(request, news)

    def _read_round(self, plan: Plan, result: StepResult, news: dict[int, _News]) -> None:
        for request_id, emitted in zip(plan.decode_request_ids, result.emitted, strict=True):
            request = None if request_id is None else self._requests.get(request_id)
            if request is not None:
                self._read_row(request, plan.depth, emitted, news)
                self._finish_if_done(request, news)

    def _read_row(
        self, request: Request, depth: int, emitted: tuple[int, ...], news: dict[int, _News]
    ) -> None:
        """num_accepted counts drafts that stay in the output: a stop token cuts off those behind it."""
        length = request.num_tokens - 1
        num_drafted = min(depth, self._depth_cap(request), request.limit - length - 1)
        assert 1 <= len(emitted) <= num_drafted + 1, (
            f"request {request.request_id} at length {length} with {num_drafted} drafts emitted {emitted}"
        )
        num_kept = self._append(request, emitted, news)
        num_accepted = min(len(emitted) - 1, num_kept)
        news[request.request_id].num_drafted += num_drafted
        news[request.request_id].num_accepted += num_accepted
        self._stats.count_row_round(num_drafted=num_drafted, num_accepted=num_accepted, num_emitted=num_kept)
        request.num_rounds_in_flight -= 1
        if request.status is Status.RUNNING:
            request.num_computed = request.num_tokens - 1
            self._prefixes.publish(request, self._num_final(length, request.num_computed))

    def _num_final(self, start: int, end: int) -> int:
        """How many tokens have all their KV, never to change, after a round from length start to end.

        The round's MTP pass saw true pairs up to slot start; what it wrote beyond came from drafts, and
        the next round's pass writes there again. Slots 0 .. start are start + 1 tokens.
        """
        return min(end, start + 1) if self._depth > 0 else end

    def _append(self, request: Request, token_ids: tuple[int, ...], news: dict[int, _News]) -> int:
        """Adds tokens up to the first that ends the request; returns how many were kept."""
        entry = news.setdefault(request.request_id, _News())
        kept, entry.finish_reason = _until_end(request, token_ids)
        request.output_token_ids += kept
        entry.token_ids += kept
        self._stats.num_generation_tokens += len(kept)
        return len(kept)

    def _finish_if_done(self, request: Request, news: dict[int, _News]) -> None:
        reason = news[request.request_id].finish_reason
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._prefixes.forget(request)
        del self._requests[request.request_id]
        self._stats.count_finished(reason.value)

    def _release(self, request: Request) -> None:
        """Row and blocks are free at once: work launched later runs after all that still writes to them."""
        self._rows.release(request)
        self._blocks.free(request.block_ids)
        request.block_ids = []


def _until_end(request: Request, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens that stay, and why they are the last. A stop token at the very end of max_tokens is a stop."""
    room = request.max_tokens - len(request.output_token_ids)
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in request.stop_token_ids:
            return token_ids[:count], FinishReason.STOP
        if count == room:
            return token_ids[:count], FinishReason.LENGTH
    return token_ids, None


def _row(request: Request) -> int:
    assert request.row is not None, f"request {request.request_id} has no row"
    return request.row


def _grant(request: Request, first_index: int) -> BlockGrant:
    return BlockGrant(_row(request), first_index, tuple(request.block_ids[first_index:]))
