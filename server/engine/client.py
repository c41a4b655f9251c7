"""The API process's view of the engine: requests in, token events out, and the care for its life.

Starts the engine, watches it, fails what was in flight when it ends and starts it again with back-off.
Knows token ids only; text is made elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
    Ready,
    Resume,
    RoundOutput,
    SetDepth,
    StatsSnapshot,
    Submit,
    ToEngine,
    TokenEvent,
    TokenTable,
)
from headway.server.engine.child import ENGINE_COMMAND, EngineChild
from headway.server.engine.process import EngineProcess, Patience
from headway.server.engine.totals import add_counters, counters_only

MAX_FIRST_STARTS = 3
MAX_FAILED_STARTS = 3  # in a row; then /health no longer counts on the next one

State = Literal["loading", "serving", "paused", "restarting", "draining", "stopped"]
_FATAL: dict[str, type[HeadwayError]] = {"ConfigError": ConfigError, "ModelError": ModelError}

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pause before a restart: doubles from first to longest, and starts over after a life in health."""

    first_seconds: float = 0.5
    longest_seconds: float = 30.0
    healthy_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's state as /health and /ready report it. heartbeat_age_seconds: None while no process runs.

    num_failed_starts: lives in a row that ended before the engine was ready. failure: why the last life
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


class Receiver(Protocol):
    """A receiver of the events of a group of requests. Its methods are called as frames arrive and must not
    raise."""

    def put(self, event: TokenEvent) -> None: ...
    def fail(self, error: HeadwayError) -> None: ...


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
    ) -> None:
        """token_table: the vocabulary, for grammars; None where requests have none. child: the process of the
        engine's first life, if it was started already."""
        self._config = config
        self._token_table = token_table
        self._command = command
        self._child = child
        self._patience = patience or Patience()
        self._back_off = back_off or BackOff()
        self._ids = itertools.count()
        self._receivers: dict[int, Receiver] = {}
        self._process: EngineProcess | None = None
        self._state: State = "loading"
        self._is_paused_by_operator = False  # an operator has paused it: also the next life of the engine
        self._depth: int | None = None  # as an operator has set it: also the next life of the engine
        self._num_restarts = self._num_failed_starts = 0
        self._failure: str | None = None
        self._past = EngineStats()
        self._now = EngineStats()
        self.info: EngineInfo | None = None

    # --- life --------------------------------------------------------------------------------------

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
        survives_restart: False where no limit is set: the next life of the engine begins with the depth that
        its check of the MTP head leaves."""
        self._depth = depth if survives_restart else None
        if self._state in ("serving", "paused", "draining"):
            self._send(SetDepth(depth))

    def drain(self, seconds: float) -> None:
        """Takes no more requests; those in flight have so long to finish, also if they were paused."""
        self.resume()
        if self._state != "stopped":
            self._state = "draining"
            error = EngineDeadError(f"the server is shutting down; it waited {seconds:g} s for this request")
            asyncio.get_running_loop().call_later(seconds, self._fail_all, error)

    async def close(self) -> None:
        """Ends the engine process; requests in flight fail."""
        self._state = "stopped"
        self._fail_all(EngineDeadError("the server has shut down"))
        if self._process is not None:
            await self._process.stop()
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._first_start.done() and not self._first_start.cancelled():
            self._first_start.exception()  # marked as retrieved: there may be no waiter
        self._first_start.cancel()

    def kill(self) -> None:
        """Ends the engine process without waiting for anything, for a server that does the same."""
        if self._process is not None:
            self._process.close()

    def status(self) -> EngineStatus:
        """Between two lives it is alive, too, until too many starts in a row have failed."""
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
        """The latest gauges; counters over all lives of the engine."""
        return add_counters(self._past, self._now)

    # --- requests ----------------------------------------------------------------------------------

    def new_request_id(self) -> int:
        return next(self._ids)

    def submit(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        """Sends the requests of one group. Raises EngineDeadError when no engine takes them now."""
        if self._state not in ("serving", "paused") or self._process is None:
            raise EngineDeadError(self._why_not())
        for request in requests:
            self._receivers[request.request_id] = receiver
            self._process.send(request)

    def abort(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends those that still run; no event of them follows. They count under `reason`."""
        for request_id in request_ids:
            if self._receivers.pop(request_id, None) is not None:
                self._send(Abort(request_id, reason))

    # --- private -----------------------------------------------------------------------------------

    def _send(self, message: ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)

    async def _supervise(self) -> None:
        pause_seconds = self._back_off.first_seconds
        while True:
            started_seconds = time.monotonic()
            failure = await self._live()
            self._failure = failure.message
            if self._state in ("draining", "stopped") or self._gave_up(failure):
                return
            self._num_restarts += 1
            if time.monotonic() - started_seconds > self._back_off.healthy_seconds:
                pause_seconds = self._back_off.first_seconds
            attempts = (
                f" (start {self._num_failed_starts} in a row that failed)" if self._num_failed_starts else ""
            )
            logger.error("the engine ended: %s; restart in %g s%s", failure.message, pause_seconds, attempts)
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, self._back_off.longest_seconds)

    def _report_fault(self, supervisor: asyncio.Task[None]) -> None:
        """A fault of the supervisor's own must not leave requests and /ready waiting for ever."""
        error = None if supervisor.cancelled() else supervisor.exception()
        if error is None:
            return
        logger.critical("the engine is no longer supervised", exc_info=error)
        self._state = "stopped"
        fault = EngineDeadError(f"the engine is no longer supervised: {error}")
        self._fail_all(fault)
        if not self._first_start.done():
            self._first_start.set_exception(fault)

    async def _live(self) -> Failure:
        """One life of the engine, to its end."""
        process: EngineProcess | None = None
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
        if self._state in ("serving", "paused"):
            self._state = "restarting"
        self._past, self._now = counters_only(self.stats), EngineStats()

    def _lose_requests(self, failure: Failure) -> None:
        """Fails what is in flight, and counts it: the engine cannot do so any more."""
        self._failure = failure.message
        if self._state in ("serving", "paused"):
            self._state = "restarting"
        finished = self._past.finished_by_reason
        finished["error"] = finished.get("error", 0) + len(self._receivers)
        self._fail_all(EngineDeadError(f"the engine ended while this request ran: {failure.message}"))

    def _gave_up(self, failure: Failure) -> bool:
        """A first start that cannot succeed by trying again is reported to its waiters."""
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
                self._deliver(event)
        elif isinstance(message, StatsSnapshot):
            self._now = message.stats
        elif isinstance(message, Ready):
            self._begin_serving(message.info)
        elif isinstance(message, Failure):
            self._lose_requests(message)

    def _begin_serving(self, info: EngineInfo) -> None:
        self.info = info
        self._num_failed_starts, self._failure = 0, None
        if self._state in ("loading", "restarting"):
            self._state = "serving"
            if self._is_paused_by_operator:
                self.pause()
        if self._depth is not None:
            self._send(SetDepth(self._depth))
        if not self._first_start.done():
            self._first_start.set_result(info)

    def _deliver(self, event: TokenEvent) -> None:
        """Events of an aborted request may still arrive; they are dropped."""
        is_last = event.finish_reason is not None
        receivers = self._receivers
        receiver = receivers.pop(event.request_id, None) if is_last else receivers.get(event.request_id)
        if receiver is not None:
            receiver.put(event)

    def _why_not(self) -> str:
        """Why no engine takes requests now; of an engine that does not start, what the last start failed
        with."""
        message = _WHY_NOT[self._state]
        if self._state != "restarting" or self._failure is None:
            return message
        if self._num_failed_starts == 0:
            return f"{message}; it ended because: {self._failure}"
        return (
            f"the engine ended and could not be started again, {self._num_failed_starts} times in a row; it is tried again "
            f"after a pause of at most {self._back_off.longest_seconds:g} s. The last start failed with: {self._failure}"
        )

    def _fail_all(self, error: HeadwayError) -> None:
        receivers, self._receivers = self._receivers, {}
        for receiver in set(receivers.values()):
            receiver.fail(error)
        for request_id in receivers:
            self._send(Abort(request_id))


_WHY_NOT: dict[State, str] = {
    "loading": "the model is still loading; /health tells how far it is",
    "serving": "the engine has just ended; it is being restarted",
    "paused": "the engine has just ended; it is being restarted",
    "restarting": "the engine ended and is being restarted; try again in a few seconds",
    "draining": "the server is shutting down and takes no more requests",
    "stopped": "the server has stopped",
}
