"""Recomputes a share of the finished requests, without drafts and without cached prefixes, and compares
tokens and log-probabilities.

Audits use idle capacity only: they run while the scheduler has no request, and are withdrawn when one comes.
The tokens that they have computed by then are kept. They are not counted in the statistics of requests. Knows
ids, no text.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from headway.engine.grammar.guide import Guide
from headway.engine.protocol.logprobs import TokenLogprobs, join
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import AuditOutcome
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler

# The most requests that wait to be audited; beyond that the oldest ones are dropped.
MAX_QUEUED = 64
# The most audits that run at once, and the share of the KV blocks that several may take, so that most cached
# prefixes stay.
MAX_RUNNING, BLOCK_SHARE = 8, 1 / 8

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Audit:
    """A request that is recomputed once it has ended. Mutable: written by the auditor.

    label: the request's name in logs. original: the request. parts: the log-probabilities of its tokens as
    they were sent; logprobs, prompt_logprobs: all of them, None where it asked for none. guide: the guide of
    the audit itself. got: the tokens that were recomputed so far, which equal those of the request.
    """

    label: str
    original: Request
    parts: list[TokenLogprobs] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    guide: Guide | None = None
    got: list[int] = field(default_factory=list)

    def note(self, event: TokenEvent) -> None:
        if event.logprobs is not None:
            self.parts.append(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs

    def prepare(self) -> None:
        """Makes the audit ready to run, after the request has ended."""
        self.logprobs = join(self.parts) if self.parts else None
        if self.original.guide is not None:
            self.guide = self.original.guide.at_beginning()

    def difference(self, event: TokenEvent) -> str | None:
        """Returns a description of what differs in the next recomputed tokens; None if nothing does."""
        start = len(self.got)
        for place, token_id in enumerate(event.token_ids, start):
            if self.original.output_token_ids[place : place + 1] != [token_id]:
                return f"token {place + 1} is another one"
            own = None if event.logprobs is None else event.logprobs.part(place - start, place - start + 1)
            if self.logprobs is not None and own != self.logprobs.part(place, place + 1):
                return f"token {place + 1} has other log-probabilities"
        if event.prompt_logprobs is not None and event.prompt_logprobs != self.prompt_logprobs:
            return "the prompt has other log-probabilities"
        return None

    def request(self, request_id: int) -> Request:
        """Returns a request for the missing tokens, which continues where the last one stopped."""
        return Request(
            request_id=request_id,
            prompt_token_ids=self.original.prompt_token_ids,
            sampling=self.original.sampling,
            max_tokens=len(self.original.output_token_ids),
            stop_token_ids=self.original.stop_token_ids,
            max_draft_tokens=0,
            guide=self.guide,
            is_audit=True,
            output_token_ids=list(self.got),
        )


class Auditor:
    """Mutable: the loop reports the requests that it adds, and shows it all events before they are sent."""

    def __init__(
        self, scheduler: Scheduler, rate: float, *, draw: Callable[[], float] = random.random
    ) -> None:
        """rate: the share of audited requests, 0 to 1. draw: returns numbers from [0, 1)."""
        self._scheduler = scheduler
        self._rate = rate
        self._draw = draw
        self._watched: dict[int, _Audit] = {}  # by the id of the request, which has not ended
        self._queue: deque[_Audit] = deque()
        self._running: dict[int, _Audit] = {}  # by the id of the request that computes it
        self._ids = count(-1, -1)

    @property
    def num_open(self) -> int:
        """Returns the number of audits that wait or run."""
        return len(self._queue) + len(self._running)

    def watch(self, request: Request, label: str) -> None:
        """Decides whether a request that the scheduler has accepted will be audited. label: its name in
        logs."""
        if self._draw() < self._rate:
            self._watched[request.request_id] = _Audit(label, request)

    def end(self, request_id: int) -> None:
        """Notes that the request has ended. Its tokens up to now are those that were sent."""
        audit = self._watched.pop(request_id, None)
        if audit is None or audit.original.finish_reason is FinishReason.ERROR:
            return
        if not audit.original.output_token_ids:
            return
        audit.prepare()
        self._queue.append(audit)
        if len(self._queue) > MAX_QUEUED:
            self._queue.popleft()
            self._count("dropped")

    def start(self) -> None:
        """Gives the scheduler audits if it has no request, or else withdraws them."""
        if self._scheduler.num_requests:
            self.recall()
            return
        while self._queue and self._has_room(self._queue[0]):
            audit, audit_id = self._queue.popleft(), next(self._ids)
            try:
                self._scheduler.add(audit.request(audit_id))
            except Exception:
                logger.exception("audit: request %s could not be computed again", audit.label)
                self._count("dropped")
            else:
                self._running[audit_id] = audit

    def recall(self) -> None:
        """Withdraws the running audits from the scheduler. Tokens of a step in flight are recomputed
        later."""
        while self._running:
            audit_id, audit = self._running.popitem()
            self._scheduler.abort(audit_id)
            self._queue.appendleft(audit)

    def read(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Returns the events of requests. It compares those of audits, and notes which requests have
        ended."""
        if self._rate == 0 and not self.num_open:
            return events
        kept = []
        for event in events:
            if event.request_id in self._running:
                self._compare(event, self._running[event.request_id])
            elif event.request_id >= 0:
                kept.append(event)
                if event.request_id in self._watched:
                    self._watched[event.request_id].note(event)
                if event.finish_reason is not None:
                    self.end(event.request_id)
        return kept

    def _has_room(self, audit: _Audit) -> bool:
        if not self._running:
            return True
        num_tokens = sum(one.original.num_tokens for one in (audit, *self._running.values()))
        is_small = num_tokens <= BLOCK_SHARE * self._scheduler.num_kv_tokens
        return is_small and len(self._running) < min(MAX_RUNNING, self._scheduler.num_rows)

    def _compare(self, event: TokenEvent, audit: _Audit) -> None:
        if (difference := audit.difference(event)) is not None:
            self._report(event.request_id, difference)
            return
        audit.got += event.token_ids
        if event.finish_reason is FinishReason.ERROR:
            self._report(event.request_id, f"after token {len(audit.got)} it failed ({event.error})")
        elif event.finish_reason is not None:
            del self._running[event.request_id]
            self._count("same")

    def _report(self, audit_id: int, what: str) -> None:
        audit = self._running.pop(audit_id)
        self._scheduler.abort(audit_id)
        self._count("different")
        logger.error(
            "audit: request %s, computed again without drafts and cached prefixes, differs: %s, of %d; until this is found, --depth 0 or "
            "--no-prefix-caching may avoid it (%d prompt tokens, %d of them cached, preempted %d times)",
            audit.label,
            what,
            len(audit.original.output_token_ids),
            len(audit.original.prompt_token_ids),
            audit.original.num_prompt_cached,
            audit.original.num_preemptions,
        )

    def _count(self, outcome: AuditOutcome) -> None:
        self._scheduler.state.stats.count_audit(outcome)
