"""The engine's loop: it takes messages, asks the scheduler for a plan, launches it and publishes the results.

One step runs while the result of the one before is read. A step is launched as late as possible, so that it
includes requests that arrive meanwhile. Knows neither tensors nor sockets.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import MaskBuffer
from headway.engine.protocol.errors import RequestError, describe_fault
from headway.engine.protocol.messages import (
    Abort,
    FromEngine,
    Heartbeat,
    Pause,
    Resume,
    RoundOutput,
    SetDepth,
    Shutdown,
    StatsSnapshot,
    Submit,
    ToEngine,
    TokenEvent,
)
from headway.engine.scheduling.audit import Auditor
from headway.engine.scheduling.launch_timer import LaunchTimer
from headway.engine.scheduling.plan import Plan, StepResult
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.scheduling.updates import refusal_event

IDLE_SECONDS = 0.5
STATS_SECONDS = 0.1
HEARTBEAT_SECONDS = 0.25
# The time between two checks of a step that may be done sooner than expected, and the shortest wait for
# messages.
_LOOK_SECONDS, _LEAST_WAIT_SECONDS = 2e-3, 1e-3

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """A launched step. wait: returns when the device is done."""

    def is_ready(self) -> bool: ...
    def wait(self) -> None: ...
    def result(self) -> StepResult: ...


class Begun(Protocol):
    """A step with guided rows whose first half is launched. buffer: takes the masks. drafts: waits for the
    drafts and returns them by row of the round. finish: launches the second half; entries: the entry of the
    buffer for each masked row."""

    @property
    def buffer(self) -> MaskBuffer: ...
    def drafts(self) -> list[list[int]]: ...
    def finish(self, entries: Mapping[int, int]) -> Handle: ...


class Launcher(Protocol):
    """An executor of plans: the runner, or a simulation of it. launch: takes plans without guided rows.
    begin: takes plans with guided rows, which must be finished."""

    def launch(self, plan: Plan) -> Handle: ...
    def begin(self, plan: Plan) -> Begun: ...


class Post(Protocol):
    """The source and sink of messages: the mailbox, or lists in a test."""

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]: ...
    def send(self, message: FromEngine) -> None: ...


class EngineLoop:
    """Mutable: owns the steps in flight, and is the only caller of scheduler and runner."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Launcher,
        post: Post,
        *,
        compiler: GrammarCompiler | None = None,
        auditor: Auditor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """compiler: None if no request may have a grammar. auditor: None if no request is audited."""
        self._compiler = compiler or GrammarCompiler(None, 0)
        self._auditor = auditor or Auditor(scheduler, 0.0)
        self._compiling: dict[int, tuple[Submit, Future[Guide]]] = {}
        self._scheduler = scheduler
        self._runner = runner
        self._post = post
        self._clock = clock
        self._launch_timer = LaunchTimer(clock)
        self._in_flight: deque[tuple[Plan, Handle]] = deque()
        self._step = 0
        self._is_paused = False
        self._stats_sent = self._heartbeat_sent = 0.0
        self._has_news = True  # something changed since the last snapshot

    def step(self) -> bool:
        """Takes messages, launches one step if there is work, and reads the results that are ready. Returns
        False after a Shutdown.

        While paused it launches nothing, and still reads the steps in flight, so that no token is held back.
        """
        since = self._clock()
        if not self._take_mail():
            self._compiler.close()
            return False
        if not self._is_paused:
            self._auditor.start()
        plan = None if self._is_paused else self._scheduler.plan()
        if plan is not None:
            if plan.guided_rows:
                handle = self._launch_masked(plan, since)
            else:
                handle = self._runner.launch(plan)
                self._note_launch(plan, since)
            self._in_flight.append((plan, handle))
            self._step += 1
        while self._in_flight and self._should_read(has_launched=plan is not None):
            self._publish(*self._in_flight.popleft())
        self._send_events(self._scheduler.drain_faults())
        self._report()
        return True

    def _launch_masked(self, plan: Plan, since: float) -> Handle:
        """Launches a step with masked rows in two halves. While the first half runs, it reads the step before
        and fills the masks. It launches the second half in any case."""
        begun = self._runner.begin(plan)
        self._note_launch(plan, since)
        entries: dict[int, int] = {}
        try:
            while self._in_flight:
                self._publish(*self._in_flight.popleft(), following=plan)
            entries = self._scheduler.fill_masks(plan, begun.drafts(), begun.buffer)
        finally:
            handle = begun.finish(entries)
        return handle

    def _note_launch(self, plan: Plan, since: float) -> None:
        if self._in_flight:
            self._launch_timer.learn_launch(since)
        else:
            self._launch_timer.expect(plan, self._clock())

    def _take_mail(self) -> bool:
        """Handles queued messages, and those that arrive until the next step must be launched. Returns False
        after a Shutdown."""
        messages = self._post.receive(self._mail_seconds())
        while True:
            for message in messages:
                if isinstance(message, Shutdown):
                    return False
                self._take(message)
            self._take_compiled()
            spare = self._launch_timer.seconds_until_due()
            if spare < _LEAST_WAIT_SECONDS or self._in_flight[0][1].is_ready():
                return True
            messages = self._post.receive(min(spare, _LOOK_SECONDS))

    def _mail_seconds(self) -> float:
        """Returns how long to wait for the first message."""
        if self._is_busy():
            return 0.0
        return _LOOK_SECONDS if self._compiling else IDLE_SECONDS

    def _is_busy(self) -> bool:
        return bool(self._in_flight) or (self._scheduler.has_work and not self._is_paused)

    def _should_read(self, *, has_launched: bool) -> bool:
        """Returns whether to wait for a step: once the next one is launched, or when none can be."""
        return not has_launched or len(self._in_flight) > 1 or self._in_flight[0][1].is_ready()

    def _take(self, message: ToEngine) -> None:
        self._has_news = True
        if isinstance(message, Submit):
            if message.grammar is None:
                self._add(message, None)
            else:
                self._compiling[message.request_id] = message, self._compiler.compile(message.grammar)
        elif isinstance(message, Abort):
            if (compiling := self._compiling.pop(message.request_id, None)) is not None:
                compiling[1].cancel()  # unless it has begun
            try:
                self._scheduler.abort(message.request_id, message.reason)
                self._auditor.end(message.request_id)
            except Exception:
                logger.exception("request %d could not be aborted; it runs to its end", message.request_id)
        elif isinstance(message, Pause | Resume):
            self._is_paused = isinstance(message, Pause)
        elif isinstance(message, SetDepth):
            self._scheduler.set_depth(message.depth)

    def _take_compiled(self) -> None:
        """Adds the requests whose grammars are compiled, which the scheduler does not know before."""
        self._compiler.tend()
        for request_id, (message, guide) in list(self._compiling.items()):
            if guide.done():
                del self._compiling[request_id]
                self._add(message, guide)

    def _add(self, message: Submit, guide: Future[Guide] | None) -> None:
        try:
            request = _request(message, None if guide is None else guide.result())
            self._auditor.recall()
            self._scheduler.add(request)
            if not request.output_token_ids:  # the log-probabilities of earlier tokens are unknown
                self._auditor.watch(request, message.label or str(message.request_id))
        except RequestError as error:
            self._post.send(RoundOutput([refusal_event(message.request_id, error)]))
        except Exception as error:
            logger.exception("request %d could not be taken in", message.request_id)
            self._scheduler.count_fault(message.request_id, describe_fault(error))

    def _publish(self, plan: Plan, handle: Handle, *, following: Plan | None = None) -> None:
        """Sends the results of the step. The next step begins when this one ends: it is `following`, or else
        the one in flight."""
        if following is None and self._in_flight:
            following = self._in_flight[0][0]
        was_done = handle.is_ready()
        handle.wait()
        end = self._clock()
        result = handle.result()
        self._launch_timer.learn_step(plan, result)
        self._launch_timer.expect(None if was_done else following, end)
        self._has_news = True
        self._send_events(self._scheduler.update(plan, result))

    def _send_events(self, found: list[TokenEvent]) -> None:
        """Sends the events of requests; those of audits stay with the auditor."""
        events = self._auditor.read(found)
        if any(event.finish_reason for event in events):
            self._send_stats()  # first, so that a client that sees the end of a request sees it counted
        if events:
            self._post.send(RoundOutput(events))

    def _report(self) -> None:
        now = self._clock()
        is_due = now - self._stats_sent >= STATS_SECONDS or not self._is_busy()
        if self._has_news and is_due:
            self._send_stats()
        if now - self._heartbeat_sent >= HEARTBEAT_SECONDS:
            self._heartbeat_sent = now
            self._post.send(Heartbeat("serve", 1.0, self._step))

    def _send_stats(self) -> None:
        self._stats_sent = self._clock()
        self._has_news = False
        self._post.send(StatsSnapshot(self._scheduler.snapshot()))


def _request(message: Submit, guide: Guide | None) -> Request:
    """Raises RequestError if the output so far does not match the grammar."""
    output_token_ids = list(message.output_token_ids or ())
    if guide is not None:
        guide.advance(output_token_ids)
    return Request(
        request_id=message.request_id,
        prompt_token_ids=message.prompt_token_ids,
        sampling=message.sampling,
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        max_draft_tokens=message.max_draft_tokens,
        prediction_token_ids=tuple(message.prediction_token_ids),
        cache_salt=message.cache_salt,
        priority=message.priority,
        group_id=message.group_id,
        guide=guide,
        is_replay=message.output_token_ids is not None,
        output_token_ids=output_token_ids,
    )
