"""Decides which waiting requests get a row, and which running ones are preempted for them. Knows ids and
numbers."""

from __future__ import annotations

import bisect

from headway.engine.scheduling.block_supply import BlockSupply
from headway.engine.scheduling.plan import TokenHistory, history_of
from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.scheduler_state import SchedulerState

Admitted = tuple[Request, TokenHistory | None]


class Admission:
    """Mutable: moves requests from the queue to the running ones, in the order of their turns (see `Queue`).

    A running request is preempted when one with a better turn needs its blocks. For a waiting request only a
    further choice of a group is preempted, and only if the waiting request's group has no row.
    max_extra_rows: the most rows besides the first one of each group. counts_prefix_queries: whether the
    prefix cache is on.
    """

    def __init__(
        self, state: SchedulerState, supply: BlockSupply, *, max_extra_rows: int, counts_prefix_queries: bool
    ) -> None:
        self._state = state
        self._supply = supply
        self._max_extra_rows = max_extra_rows
        self._counts_prefix_queries = counts_prefix_queries

    def make_room(self, budget: int) -> None:
        """Preempts further choices of groups until groups without a row can have rows and blocks. It runs
        before admission, so that no request has to move that the device does not know yet. budget: the prompt
        tokens of the step."""
        state = self._state
        if not state.waiting or state.waiting.num_extra == 0:
            return
        num_blocks = 0
        for num_rows, request in enumerate(list(state.waiting.newcomers()), start=1):
            if request.is_in_flight or self._num_tokens_before(request) >= budget:
                return
            num_blocks += -(-(request.num_tokens + state.depth + 1) // state.block_size)
            while state.rows.num_free < num_rows or not self._supply.has_blocks(num_blocks):
                extra = [r for r in state.running if self._may_give_way(r, request.priority)]
                if not extra:
                    return
                state.preempt(max(extra, key=state.waiting.turn))

    def admit(self, budget: int) -> list[Admitted]:
        """Admits requests from the front of the queue while the step's token budget is not used up by earlier
        requests."""
        admitted: list[Admitted] = []
        while (request := self._next()) is not None:
            if self._num_tokens_before(request) >= budget:
                break
            if not request.is_in_flight:
                self._state.contain(self._try_admit, request, admitted)
            if request.status is Status.WAITING:
                break  # no request overtakes it
        return admitted

    def _next(self) -> Request | None:
        if not self._state.waiting or self._state.rows.is_full:
            return None
        queue = self._state.waiting
        return queue.first(allows_extra=queue.num_extra < self._max_extra_rows)

    def _may_give_way(self, request: Request, priority: int) -> bool:
        """Returns whether the running request may be preempted for one of that priority whose group has no
        row."""
        turn = self._state.waiting.turn(request)
        return turn.rank > 1 and turn.priority >= priority

    def _num_tokens_before(self, request: Request) -> int:
        """Returns the prompt tokens still to be computed of running requests with an earlier turn."""
        turn = self._state.waiting.turn(request)
        return sum(
            running.num_tokens - running.num_computed
            for running in self._state.running
            if running.status is Status.PREFILLING and self._state.waiting.turn(running) < turn
        )

    def _try_admit(self, request: Request, admitted: list[Admitted]) -> None:
        """Admits the request, unless there are too few blocks."""
        state = self._state
        history = history_of(request)
        if not self._supply.take_for_admission(request):
            return
        state.waiting.remove(request)
        request.status = Status.PREFILLING
        bisect.insort(state.running, request, key=lambda r: r.precedence)
        state.rows.take(request)
        state.waiting.note_start(request)
        admitted.append((request, history))
        if request.num_preemptions == 0 and not (request.is_replay and request.output_token_ids):
            self._count_first_admission(request)

    def _count_first_admission(self, request: Request) -> None:
        state = self._state
        request.queue_seconds = state.clock() - request.arrival_seconds
        stats = state.stats_of(request)
        stats.num_prompt_tokens += len(request.prompt_token_ids)
        request.num_prompt_cached = request.num_cached
        stats.num_cached_prompt_tokens += request.num_cached
        if self._counts_prefix_queries and not request.scores_prompt:
            stats.num_prefix_query_tokens += len(request.prompt_token_ids)
