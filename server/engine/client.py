"""The API process's view of the engine: requests in, token events out, and the supervision of the process.

It starts the engine, watches it, restarts it with back-off when it ends, and sends the requests in flight
again. It knows token ids only; text is made elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from headway.engine import (
    Abort,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    EngineInfo,
    EngineStats,
    Failure,
    FinishReason,
    FromEngine,
    HeadwayError,
    ModelError,
    Pause,
    Phase,
    QueueFullError,
    Ready,
    Resume,
    RoundOutput,
    SetDepth,
    StatsSnapshot,
    Submit,
    ToEngine,
    TokenTable,
)
from headway.server.engine.child import ENGINE_COMMAND, EngineChild
from headway.server.engine.flights import Flight, Flights, Receiver
from headway.server.engine.process import EngineProcess, Patience
from headway.server.engine.totals import add_counters, counters_only

MAX_FIRST_STARTS = 3
MAX_FAILED_STARTS = 3  # in a row; then /health reports the engine as dead

State = Literal["loading", "serving", "paused", "restarting", "draining", "stopped"]
_FATAL: dict[str, type[HeadwayError]] = {"ConfigError": ConfigError, "ModelError": ModelError}

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class BackOff:
    """The pause before a restart. It starts over after a life that served anything; it doubles, up to the
    longest, after a life that was never ready or that a single request ended."""

    first_seconds: float = 0.5
    longest_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's state as /health and /ready report it. heartbeat_age_seconds: None while no process runs.

    num_failed_starts: successive lives that ended before the engine was ready. failure: why the last life
    ended; None once the next one is ready.
    """

    state: State
    phase: Phase
    progress: float
    step: int
    heartbeat_age_seconds: float | None
    is_alive: bool
    num_restarts: int
    num_failed_starts: int = 0
    failure: str | None = None


class EngineClient:
    """Mutable: the only owner of the engine process and of the table of requests in flight."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        patience: Patience | None = None,
        back_off: BackOff | None = None,
        token_table: TokenTable | None = None,
        child: EngineChild | None = None,
        replay: int = 0,
    ) -> None:
        """token_table: the vocabulary for grammars; None if no request may have one. child: the process of
        the first life, if it was started already. replay: how often a request is sent again that was in
        flight when the engine ended, see `Flights`; it waits for at most patience.load_seconds."""
        self._config = config
        self._token_table = token_table
        self._command = command
        self._child = child
        self._patience = patience or Patience()
        self._back_off = back_off or BackOff()
        self._ids = itertools.count()
        self._replay = replay
        self._flights = Flights(replay)
        self._expectation: asyncio.TimerHandle | None = None  # set while requests wait for the next life
        self._process: EngineProcess | None = None
        self._state: State = "loading"
        self._takes_requests = self._has_served = self._is_own_crash = False  # states of the present life
        self._is_paused_by_operator = False  # holds for the next life of the engine, too
        self._depth: int | None = None  # set by an operator; holds for the next life, too
        self._num_restarts = self._num_failed_starts = 0
        self._failure: str | None = None
        self._past = EngineStats()
        self._now = EngineStats()
        self.info: EngineInfo | None = None

    def start(self) -> None:
        """Returns at once; `wait_until_ready` tells how it went."""
        self._first_start: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        self._supervisor.add_done_callback(self._report_fault)

    async def wait_until_ready(self) -> EngineInfo:
        """Raises ConfigError, ModelError or EngineDeadError if the first start fails for good."""
        return await asyncio.shield(self._first_start)

    def pause(self) -> None:
        """Stops token generation until `resume`: running requests stay admitted, new ones wait."""
        self._is_paused_by_operator = True
        if self._state == "serving":
            self._state = "paused"
            self._send(Pause())

    def resume(self) -> None:
        self._is_paused_by_operator = False
        if self._state == "paused":
            self._state = "serving"
            self._send(Resume())

    def set_depth(self, depth: int, *, survives_restart: bool = True) -> None:
        """Limits the drafts of every round from the next step on, 0 to the configured depth.
        survives_restart: False if no limit is set; the next life of the engine then begins with the depth
        that its check of the drafter leaves."""
        self._depth = depth if survives_restart else None
        if self._state in ("serving", "paused", "draining"):
            self._send(SetDepth(depth))

    def drain(self, seconds: float) -> None:
        """Gives requests this time to finish, those that are paused or not yet submitted, too."""
        self.resume()
        if self._state != "stopped":
            self._state = "draining"
            error = EngineDeadError(f"the server is shutting down; it waited {seconds:g} s for this request")
            asyncio.get_running_loop().call_later(seconds, self._fail, None, error)

    async def close(self) -> None:
        """Ends the engine process; requests in flight fail."""
        self._state = "stopped"
        self._stop_timer()
        self._fail(None, EngineDeadError("the server has shut down"))
        if self._process is not None:
            await self._process.stop()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._first_start.done() and not self._first_start.cancelled():
            self._first_start.exception()  # marked as retrieved: there may be no waiter
        self._first_start.cancel()

    def kill(self) -> None:
        """Ends the engine process without waiting, for a server that ends the same way."""
        if self._process is not None:
            self._process.close()

    def status(self) -> EngineStatus:
        """Returns the present state. Between two lives the engine counts as alive until too many starts in
        a row have failed."""
        process = self._process
        beat = process.heartbeat if process else None
        return EngineStatus(
            state=self._state,
            phase=beat.phase if beat else "load",
            progress=beat.progress if beat else 0.0,
            step=beat.step if beat else 0,
            heartbeat_age_seconds=process.heartbeat_age_seconds if process else None,
            is_alive=self._state != "stopped"
            and self._num_failed_starts < MAX_FAILED_STARTS
            and (process is None or process.is_alive),
            num_restarts=self._num_restarts,
            num_failed_starts=self._num_failed_starts,
            failure=self._failure,
        )

    @property
    def stats(self) -> EngineStats:
        """Returns the latest gauges, and the counters over all lives of the engine."""
        return add_counters(self._past, self._now)

    def new_request_id(self) -> int:
        return next(self._ids)

    @property
    def num_replays(self) -> int:
        """Returns how many times a group of requests was sent to another life of the engine."""
        return self._flights.num_replays

    def submit(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        """Sends the requests of one group, or lets them wait for the next life of an engine that has just
        ended. Raises EngineDeadError if no engine is expected, QueueFullError if too many requests wait."""
        is_awaited = self._state == "restarting" and self._expectation is not None
        # A draining server gets no new requests, but may still have been preparing some.
        is_there = self._state in ("serving", "paused") or (
            self._state == "draining" and self._takes_requests
        )
        if not is_there and not is_awaited:
            raise EngineDeadError(self._why_not())
        limit = self._config.max_waiting
        if self._flights.num_waiting >= limit:
            raise QueueFullError(
                f"{limit:,} requests wait for the engine, which is the limit (max_waiting); try again later",
                code="queue_full",
            )
        self._flights.add(requests, receiver)
        self._send_due()

    def abort(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends those requests that still run; no event of them follows. They are counted under `reason`."""
        for request_id in request_ids:
            if self._flights.remove(request_id):
                self._send(Abort(request_id, reason))
        self._go_on_trying()

    def _send(self, message: ToEngine) -> None:
        if self._process is not None and self._takes_requests:
            self._process.send(message)

    def _send_due(self) -> None:
        if self._takes_requests:
            for request in self._flights.take_due():
                self._send(request)

    def _go_on_trying(self) -> None:
        if self._flights.is_trying:
            self._send_due()

    async def _supervise(self) -> None:
        pause_seconds = self._back_off.first_seconds
        while True:
            failure = await self._live()
            is_over = self._state == "stopped" or (self._state == "draining" and not self._flights)
            if is_over or self._gave_up(failure):
                return
            self._num_restarts += 1
            doubles = self._num_failed_starts > 0 or self._is_own_crash
            if self._has_served and not doubles:
                pause_seconds = self._back_off.first_seconds
            attempts = (
                f" (start {self._num_failed_starts} in a row that failed)" if self._num_failed_starts else ""
            )
            waiting = f"; {len(self._flights)} requests wait for it" if self._flights else ""
            logger.error(
                "the engine ended: %s; restart in %g s%s%s", failure.message, pause_seconds, attempts, waiting
            )
            await asyncio.sleep(pause_seconds)
            if doubles:
                pause_seconds = min(2 * pause_seconds, self._back_off.longest_seconds)

    def _report_fault(self, supervisor: asyncio.Task[None]) -> None:
        """Fails all requests after a fault of the supervisor itself, so that neither they nor /ready wait
        for ever."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is None:
            return
        logger.critical("the engine is no longer supervised", exc_info=error)
        self._state = "stopped"
        fault = EngineDeadError(f"the engine is no longer supervised: {error}")
        self._fail(None, fault)
        if not self._first_start.done():
            self._first_start.set_exception(fault)

    async def _live(self) -> Failure:
        """Runs one life of the engine to its end."""
        process: EngineProcess | None = None
        self._has_served = self._is_own_crash = False
        try:
            process = EngineProcess(
                self._config,
                self._receive,
                command=self._command,
                patience=self._patience,
                token_table=self._token_table,
                child=self._child,
            )
            self._child = None
            await process.start()
            self._process = process
            failure = await process.ended()
        except OSError as error:
            failure = Failure("crash", f"the engine process cannot be started: {error}")
        finally:
            self._bury()
            if process is not None:
                process.close()
        self._lose_requests(failure)
        return failure

    def _bury(self) -> None:
        if self._process is not None and self._process.heartbeat.phase != "serve":
            self._num_failed_starts += 1
        self._process = None
        self._past, self._now = counters_only(self.stats), EngineStats()

    def _lose_requests(self, failure: Failure) -> None:
        """Lets the requests in flight wait for the next life, or fails them."""
        self._failure = failure.message
        self._takes_requests = False
        if self._state in ("serving", "paused"):
            self._state = "restarting"
        lost, was_alone = self._flights.note_crash()
        self._is_own_crash |= was_alone
        for flight in lost if was_alone else ():
            logger.error(
                "request %s ended the engine %d times, the last time alone", flight.name, flight.num_crashes
            )
        self._fail_dead(lost, f"the engine ended while this request ran: {failure.message}")
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self._end_expectation()
        elif self._replay and self._expectation is None and self._state in ("restarting", "draining"):
            seconds = self._patience.load_seconds
            self._expectation = asyncio.get_running_loop().call_later(seconds, self._end_expectation)

    def _end_expectation(self) -> None:
        """Fails the requests that wait for an engine which does not come back."""
        self._stop_timer()
        self._fail_dead(None, self._why_not())

    def _stop_timer(self) -> None:
        if self._expectation is not None:
            self._expectation.cancel()
            self._expectation = None

    def _fail_dead(self, flights: Sequence[Flight] | None, why: str) -> None:
        """Fails these flights, or all, and counts them, which the engine no longer can."""
        num_before = len(self._flights)
        self._fail(flights, EngineDeadError(why))
        finished = self._past.finished_by_reason
        finished["error"] = finished.get("error", 0) + num_before - len(self._flights)

    def _gave_up(self, failure: Failure) -> bool:
        """Returns whether the first start cannot succeed by another attempt, and then reports it to its
        waiters."""
        if self._first_start.done():
            return False
        kind = _FATAL.get(failure.kind)
        if kind is None and self._num_restarts + 1 < MAX_FIRST_STARTS:
            return False
        self._state = "stopped"
        self._first_start.set_exception((kind or EngineDeadError)(failure.message))
        return True

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, RoundOutput):
            for event in message.events:
                self._has_served = True
                self._flights.deliver(event)
            self._go_on_trying()
        elif isinstance(message, StatsSnapshot):
            self._now = message.stats
        elif isinstance(message, Ready):
            self._begin_serving(message.info)
        elif isinstance(message, Failure):
            self._lose_requests(message)

    def _begin_serving(self, info: EngineInfo) -> None:
        self.info = info
        self._num_failed_starts, self._failure = 0, None
        self._takes_requests = True
        self._stop_timer()
        if self._state in ("loading", "restarting"):
            self._state = "serving"
            if self._is_paused_by_operator:
                self.pause()
        if self._depth is not None:
            self._send(SetDepth(self._depth))
        if not self._first_start.done():
            self._first_start.set_result(info)
        if too_long := self._flights.longer_than(info.max_model_len):
            self._fail_dead(
                too_long, f"the engine ended, and the next one takes {info.max_model_len:,} tokens at most"
            )
        self._send_due()

    def _why_not(self) -> str:
        """Returns why no engine accepts requests now; if it does not start, with the failure of the last
        start."""
        message = _WHY_NOT[self._state]
        if self._state != "restarting" or self._failure is None:
            return message
        if self._num_failed_starts == 0:
            return f"{message}; it ended because: {self._failure}"
        return (
            f"the engine ended and could not be started again, {self._num_failed_starts} times in a row; it is tried again "
            f"after a pause of at most {self._back_off.longest_seconds:g} s. The last start failed with: {self._failure}"
        )

    def _fail(self, flights: Sequence[Flight] | None, error: HeadwayError) -> None:
        """Fails these flights, or all, with the error."""
        for request_id in self._flights.fail(flights, error):
            self._send(Abort(request_id))


_WHY_NOT: dict[State, str] = {
    "loading": "the model is still loading; /health shows its progress",
    "serving": "the engine has just ended; it is being restarted",
    "paused": "the engine has just ended; it is being restarted",
    "restarting": "the engine ended and is being restarted; try again in a few seconds",
    "draining": "the server is shutting down",
    "stopped": "the server has stopped",
}
