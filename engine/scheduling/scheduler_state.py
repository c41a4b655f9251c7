"""Holds the state that the parts of the scheduler share. Requests leave it when they end, are preempted or
fail."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.drafters import DrafterTraits
from headway.engine.protocol.errors import LogitsError, RequestError, describe_fault
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import EngineStats
from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.checkpoints import Checkpoints
from headway.engine.scheduling.depth.policy import DepthPolicy
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.queue import Queue
from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.rows import RowTable
from headway.engine.scheduling.updates import fault_event, refusal_event

P = ParamSpec("P")
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerState:
    """Requests, rows, blocks and counters. Mutable: the scheduler and its parts are the only writers.

    requests: every request that has not ended, by id. running: those with a row, by priority, then arrival.
    depth: the most drafts of the next round; depth_limit: the upper limit of depth, which an operator sets;
    max_depth: the upper limit of depth_limit. depth_policy: chooses the depth; None: it is depth_limit.
    has_late_slots: the drafter processes the tokens of a round in a later round. holds_rounds: while true no
    round is planned. fault_events and broken_block_ids are kept until the scheduler hands them out.
    num_audits: the number of audits among the requests, which is 0 or all of them; audit_stats: their
    counters, which are not reported.
    """

    block_size: int
    waiting: Queue
    rows: RowTable
    blocks: BlockAllocator
    prefixes: PrefixCache
    stats: EngineStats
    audit_stats: EngineStats
    clock: Callable[[], float]
    depth: int
    depth_limit: int
    max_depth: int
    has_late_slots: bool
    holds_rounds: bool = False
    depth_policy: DepthPolicy | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    fault_events: list[TokenEvent] = field(default_factory=list)
    broken_block_ids: list[int] = field(default_factory=list)
    num_audits: int = 0

    @property
    def num_generated(self) -> int:
        """Returns the number of generated tokens, including those of audits."""
        return self.stats.num_generation_tokens + self.audit_stats.num_generation_tokens

    def stats_of(self, request: Request) -> EngineStats:
        """Returns the counters that count the request."""
        return self.audit_stats if request.is_audit else self.stats

    def own_cap(self, request: Request) -> int:
        """Returns the most drafts that the request allows in any round."""
        cap = request.max_draft_tokens
        return self.max_depth if cap is None else min(self.max_depth, cap)

    def depth_cap(self, request: Request) -> int:
        """Returns the most drafts of the request's next round."""
        return min(self.depth, self.own_cap(request))

    def can_decode(self, request: Request) -> bool:
        """Returns whether the request takes part in the next round. It does not while rounds are held, nor if
        the rounds in flight, which add at least one token each, will bring it to its limit."""
        is_below_limit = request.num_computed + request.num_rounds_in_flight < request.limit
        return request.status is Status.RUNNING and is_below_limit and not self.holds_rounds

    def is_plain(self) -> bool:
        """Returns whether no row adjusts its logits or returns log-probabilities."""
        return not any(r.sampling.adjusts_logits or r.sampling.num_logprobs is not None for r in self.running)

    def prefilling(self) -> list[Request]:
        """Returns the running requests whose prompts are not computed yet, in the order of their turns."""
        prefilling = [request for request in self.running if request.status is Status.PREFILLING]
        return sorted(prefilling, key=self.waiting.turn)

    def contain(
        self,
        work: Callable[Concatenate[Request, P], object],
        request: Request,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Does work for one request. A fault ends only that request."""
        try:
            work(request, *args, **kwargs)
        except LogitsError as error:
            logger.error("request %d ends: %s", request.request_id, error)
            self.stats_of(request).num_nan_logits += 1
            block_ids = request.block_ids
            self.blocks.unpublish(block_ids)
            self.prefixes.drop_checkpoints(request)
            self.end_by_fault(request, str(error))
            # Shared blocks are either sound, or also end the requests that share them.
            self.broken_block_ids += [i for i in block_ids if not self.blocks.is_used(i)]
        except RequestError as error:
            logger.info("request %d ends: %s", request.request_id, error)
            self.finish(request, FinishReason.ERROR)
            self.fault_events.append(refusal_event(request.request_id, error))
        except Exception as error:
            logger.exception("request %d ends because of a fault", request.request_id)
            self.end_by_fault(request, describe_fault(error))

    def end_by_fault(self, request: Request, what: str) -> None:
        """Ends the request by an error; its event joins `fault_events`."""
        self.finish(request, FinishReason.ERROR)
        self.fault_events.append(fault_event(request.request_id, what))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends the request in any status. What a step in flight adds to it is dropped."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self.waiting.note_end(request)
        self._release(request)
        self.prefixes.drop_pending(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        self.num_audits -= request.is_audit
        self.stats_of(request).count_finished(reason.value)
        self.prefixes.forget(request)

    def preempt(self, request: Request) -> None:
        """Puts the request back in its place in the queue. All its tokens so far will be prefilled again
        (recomputation)."""
        self.running.remove(request)
        self.waiting.note_end(request)
        self._release(request)
        self.prefixes.drop_pending(request)
        request.status = Status.WAITING
        request.num_computed = 0
        request.num_draft_filled = 0
        request.num_preemptions += 1
        self.stats_of(request).num_preemptions += 1
        self.waiting.append(request)

    def free_blocks(self, request: Request) -> None:
        """Takes all blocks from the request."""
        block_ids, request.block_ids = request.block_ids, []
        self.blocks.free(block_ids)

    def _release(self, request: Request) -> None:
        """Frees row and blocks at once: later steps run after every step that still writes to them."""
        if request.draft_record is not None:
            request.draft_record.leave()
        if request.row is not None:
            self.rows.release(request)
        self.free_blocks(request)


def new_state(
    config: EngineConfig,
    *,
    num_blocks: int,
    depth: int,
    drafter: DrafterTraits,
    num_checkpoints: int | None,
    prompt_grid: int | None,
    clock: Callable[[], float],
) -> SchedulerState:
    """Returns the state before the first request. depth: the most drafts of a round. The other arguments: see
    Scheduler."""
    checkpoints = None if num_checkpoints is None else Checkpoints(num_checkpoints)
    blocks = BlockAllocator(num_blocks, on_unpublish=None if checkpoints is None else checkpoints.drop)
    prefixes = PrefixCache(
        blocks,
        block_size=config.block_size,
        is_enabled=config.prefix_caching,
        checkpoints=checkpoints,
        prompt_grid=prompt_grid,
    )
    stats = EngineStats.empty(num_kv_blocks=num_blocks, kv_block_size=config.block_size, depth=depth)
    return SchedulerState(
        config.block_size,
        Queue(config.max_waiting),
        RowTable(config.num_rows),
        blocks,
        prefixes,
        stats,
        copy.deepcopy(stats),
        clock,
        depth,
        depth_limit=depth,
        max_depth=depth,
        has_late_slots=depth > 0 and drafter.leaves_pending,
    )
