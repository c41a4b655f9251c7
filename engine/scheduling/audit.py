"""Computes a share of the finished requests again, without drafts and without cached prefixes, and compares the tokens.

Audits take what requests leave: one starts only while no request waits, several at once where none runs, and they give rows and
blocks back to requests that wait. Their tokens and their time count in no statistics of requests. Knows ids, no text.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

import msgspec

from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import AuditOutcome
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler

# Requests that wait to be audited; more are dropped.
MAX_QUEUED = 64
# Audits that run at once while no request does.
MAX_RUNNING = 8
# After every request's, whose priorities have 64 bits.
PRIORITY = 1 << 64

logger = logging.getLogger(__name__)


class _Watched(NamedTuple):
    """A request that is to be audited once it has ended. label: its name in logs."""

    request: Request
    label: str


class Auditor:
    """Mutable: the loop tells it of the requests that it takes in, and shows it all events before they are sent."""

    def __init__(
        self, scheduler: Scheduler, rate: float, *, draw: Callable[[], float] = random.random
    ) -> None:
        """rate: the share of the requests that is audited, 0 to 1. draw: returns numbers from [0, 1)."""
        self._scheduler = scheduler
        self._rate = rate
        self._draw = draw
        self._watched: dict[int, _Watched] = {}
        self._queue: deque[_Watched] = deque()
        self._running: dict[int, _Watched] = {}  # by the id of the audit's own request
        self._num_compared: dict[int, int] = {}  # likewise
        self._ids = count(-1, -1)

    def watch(self, request: Request, label: str) -> None:
        """Decides whether a request that the scheduler has taken in will be audited. label: its name in logs."""
        if self._draw() < self._rate:
            self._watched[request.request_id] = _Watched(request, label)

    def end(self, request_id: int) -> None:
        """Notes that the request has ended: the tokens that it has got by now are those that were sent."""
        watched = self._watched.pop(request_id, None)
        if watched is None or watched.request.finish_reason is FinishReason.ERROR:
            return
        if not watched.request.output_token_ids:
            return
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(watched)
        else:
            self._count("dropped")

    def start(self) -> None:
        """Gives the scheduler as many audits as it has room for."""
        while self._queue and len(self._running) < self._num_wanted():
            watched = self._queue.popleft()
            audit = _audit_of(watched.request, next(self._ids))
            try:
                self._scheduler.add(audit)
            except RequestError as error:
                self._drop(watched, str(error))
            else:
                self._running[audit.request_id] = watched
                self._num_compared[audit.request_id] = 0

    def read(self, events: Iterable[TokenEvent]) -> list[TokenEvent]:
        """Returns the events of requests; compares those of audits, and notes which requests have ended."""
        kept = []
        for event in events:
            if event.request_id in self._running:
                self._compare(event)
            elif event.request_id >= 0:
                kept.append(event)
                if event.finish_reason is not None:
                    self.end(event.request_id)
        return kept

    def _num_wanted(self) -> int:
        """Returns how many audits may run by now."""
        scheduler = self._scheduler
        if scheduler.num_waiting:
            return 0
        if scheduler.num_running == 0:
            return min(MAX_RUNNING, scheduler.num_rows)
        return 1 if 2 * scheduler.num_running <= scheduler.num_rows else 0

    def _compare(self, event: TokenEvent) -> None:
        watched = self._running[event.request_id]
        if event.finish_reason is FinishReason.ERROR:
            self._drop(watched, event.error or "an error ended it")
            self._forget(event.request_id)
            return
        expected, start = watched.request.output_token_ids, self._num_compared[event.request_id]
        end = start + len(event.token_ids)
        if event.token_ids != expected[start:end]:
            pairs = zip(event.token_ids, expected[start:end], strict=False)
            same = next((i for i, (one, other) in enumerate(pairs) if one != other), 0)
            self._report(watched, start + same)
            self._scheduler.abort(event.request_id)
            self._forget(event.request_id)
        elif event.finish_reason is not None:
            self._count("same")
            self._forget(event.request_id)
        else:
            self._num_compared[event.request_id] = end

    def _report(self, watched: _Watched, place: int) -> None:
        self._count("different")
        logger.error(
            "audit: token %d of %d of request %s is not the one that the model gives without drafts and cached prefixes; until this "
            "is found, --depth 0 or --no-prefix-caching may avoid it (%d prompt tokens, %d of them cached, preempted %d times)",
            place + 1,
            len(watched.request.output_token_ids),
            watched.label,
            len(watched.request.prompt_token_ids),
            watched.request.num_prompt_cached,
            watched.request.num_preemptions,
        )

    def _drop(self, watched: _Watched, why: str) -> None:
        self._count("dropped")
        logger.warning("audit: request %s could not be computed again: %s", watched.label, why)

    def _forget(self, audit_id: int) -> None:
        del self._running[audit_id], self._num_compared[audit_id]

    def _count(self, outcome: AuditOutcome) -> None:
        self._scheduler.state.stats.count_audit(outcome)


def _audit_of(request: Request, audit_id: int) -> Request:
    """Returns a request for the tokens that a finished one got."""
    sampling = msgspec.structs.replace(request.sampling, num_logprobs=None, num_prompt_logprobs=None)
    return Request(
        request_id=audit_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling,
        max_tokens=len(request.output_token_ids),
        stop_token_ids=request.stop_token_ids,
        max_draft_tokens=0,
        priority=PRIORITY,
        guide=None if request.guide is None else request.guide.at_beginning(),
        is_audit=True,
    )
