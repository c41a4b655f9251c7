"""Runs clients' jobs in a process that they may crash (worker_process.py), and shares it fairly among
clients.

Each job first runs in a lane for quick jobs, which allows little processor time. A job that needs more waits
for the lane of long jobs, so that a client of slow jobs waits for slow jobs alone. The next job is that of
the client that has used the least processor time lately.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from headway.server.base.errors import RETRY_AFTER, ApiError
from headway.server.base.worker_process import ANSWER, JOB

# The client of the request that runs: its key, or else its address. The guard is the only writer. Without it
# every function between a route and a pool would have it as a parameter.
CLIENT: ContextVar[str] = ContextVar("client", default="")

NUM_QUICK = 2  # lanes; one more is for long jobs
START_SECONDS = 60.0
HUNG_SECONDS = 120.0  # the wall time of one job
WAIT_SECONDS = 30.0  # for a free lane
MAX_WAITING = 64
MAX_CLIENTS = 1024
HALF_LIFE_SECONDS = 30.0  # of the processor time that is remembered for each client


@dataclass(frozen=True, slots=True)
class Purpose:
    """A kind of jobs. verb: what the process does, such as "checks grammars". seconds: the processor time
    that a job may take; quick_seconds: the same in the lane for quick jobs. hello: returns the first
    payload, which the process gets at its start."""

    verb: str
    code: str  # of the error if there is no process, or no free lane
    seconds: float
    quick_seconds: float
    hello: Callable[[], bytes]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job. exit_code: that of a child process which the job has ended; 0 if there is an
    answer. seconds: an upper bound of the processor time used."""

    exit_code: int
    seconds: float
    payload: bytes

    @property
    def is_too_slow(self) -> bool:
        return self.exit_code == -signal.SIGPROF


@dataclass(eq=False, slots=True)
class _Lane:
    is_quick: bool
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(eq=False, slots=True)
class _Turn:
    client: str
    is_quick: bool
    lane: asyncio.Future[_Lane]


class WorkerPool:
    """Mutable: owns the process, which it starts when needed, its lanes, and the jobs that wait."""

    def __init__(self, command: Sequence[str], purpose: Purpose) -> None:
        self._command = command
        self._purpose = purpose
        self._starting = asyncio.Lock()
        self.process: Process | None = None
        self._lanes: list[_Lane] = []
        self._free: list[_Lane] = []
        self._waiting: list[_Turn] = []
        self._used = _ProcessorTime()
        self._running: set[asyncio.Task[Outcome]] = set()

    async def run(self, payload: bytes) -> Outcome:
        """Raises ApiError (503) if there is no process, or if the job had to wait for too long."""
        outcome = await self._run(payload, is_quick=True)
        return await self._run(payload, is_quick=False) if outcome.is_too_slow else outcome

    async def start(self) -> None:
        """Raises ApiError (503) if the process does not start."""
        async with self._starting:
            if self.process is not None and self.process.returncode is None:
                return
            await self._stop()
            try:
                await self._start()
            except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
                await self._stop()
                raise self._refusal(f"does not start ({type(error).__name__}); try again") from error

    async def close(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._stop()

    async def _run(self, payload: bytes, *, is_quick: bool) -> Outcome:
        """Runs a job in one lane. It goes on if its client leaves, since only the end of the process could
        stop it."""
        await self.start()
        client = CLIENT.get()
        lane = await self._turn(client, is_quick=is_quick)
        task = asyncio.create_task(self._exchange(lane, payload, client))
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            raise self._refusal(f"has ended ({type(error).__name__}); try again") from error

    async def _exchange(self, lane: _Lane, payload: bytes, client: str) -> Outcome:
        purpose = self._purpose
        seconds = min(purpose.seconds, purpose.quick_seconds) if lane.is_quick else purpose.seconds
        is_answered = False
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                outcome = await _ask(lane, payload, seconds)
            if outcome.exit_code:
                outcome = replace(outcome, seconds=seconds)
            is_answered = True
        finally:
            if is_answered:
                self._used.add(client, outcome.seconds)
                self._release(lane)
            elif lane in self._lanes:  # otherwise its process has been replaced already
                await self._stop()
        return outcome

    def _forget(self, task: asyncio.Task[Outcome]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: no caller may be left

    async def _turn(self, client: str, *, is_quick: bool) -> _Lane:
        free = next((lane for lane in self._free if lane.is_quick == is_quick), None)
        if free is not None:
            self._free.remove(free)
            return free
        if len(self._waiting) >= MAX_WAITING:
            self._make_room(client)
        turn = _Turn(client, is_quick, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await turn.lane
        except TimeoutError:
            self._give_up(turn)
            raise self._refusal(f"had no time for this in {WAIT_SECONDS:g} s; try again later") from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _give_up(self, turn: _Turn) -> None:
        """Releases a lane that was handed over at the very moment at which its job stopped waiting."""
        if turn.lane.done() and not turn.lane.cancelled() and turn.lane.exception() is None:
            self._release(turn.lane.result())

    def _make_room(self, client: str) -> None:
        """Refuses the newest job of the client that has the most jobs waiting. Raises ApiError (503) if
        that is the client that asks."""
        refusal = self._refusal(
            f"has {len(self._waiting)} requests that wait, which is the limit; try again later"
        )
        counts = Counter(turn.client for turn in self._waiting)
        most, count = counts.most_common(1)[0]
        if counts[client] >= count:
            raise refusal
        newest = next(turn for turn in reversed(self._waiting) if turn.client == most)
        self._waiting.remove(newest)
        newest.lane.set_exception(refusal)

    def _release(self, lane: _Lane) -> None:
        if lane not in self._lanes:
            return  # its process has ended
        turns = [turn for turn in self._waiting if turn.is_quick == lane.is_quick and not turn.lane.done()]
        if not turns:
            self._free.append(lane)
            return
        following = min(turns, key=lambda turn: self._used.of(turn.client))
        self._waiting.remove(following)
        following.lane.set_result(lane)

    async def _start(self) -> None:
        """Starts the process. The time that it needs counts for no job."""
        pairs = [socket.socketpair() for _ in range(NUM_QUICK + 1)]
        theirs = [their.fileno() for _, their in pairs]
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, *map(str, theirs), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
                pass_fds=theirs, env=os.environ | self._purpose.environment,
            )  # fmt: skip
        except BaseException:
            for our, _ in pairs:
                our.close()
            raise
        finally:
            for _, their in pairs:
                their.close()
        streams = [await asyncio.open_connection(sock=our) for our, _ in pairs]
        self._lanes = [_Lane(i < NUM_QUICK, *stream) for i, stream in enumerate(streams)]
        async with asyncio.timeout(START_SECONDS):
            await _ask(self._lanes[0], self._purpose.hello(), 0.0)
        for lane in self._lanes:
            self._release(lane)

    async def _stop(self) -> None:
        process, self.process = self.process, None
        lanes, self._lanes, self._free = self._lanes, [], []
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.lane.done():
                turn.lane.set_exception(self._refusal("has ended; try again"))
        for lane in lanes:
            lane.writer.close()
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for lane in lanes:
            with suppress(OSError):  # a process that has ended does not read the rest
                await lane.writer.wait_closed()

    def _refusal(self, what: str) -> ApiError:
        message = f"the process that {self._purpose.verb} {what}"
        return ApiError(message, status=503, code=self._purpose.code, headers=RETRY_AFTER)


async def _ask(lane: _Lane, payload: bytes, seconds: float) -> Outcome:
    lane.writer.write(JOB.pack(seconds, len(payload)))
    lane.writer.write(payload)
    await lane.writer.drain()
    code, used_seconds, length = ANSWER.unpack(await lane.reader.readexactly(ANSWER.size))
    return Outcome(code, used_seconds, await lane.reader.readexactly(length))


class _ProcessorTime:
    """The processor time of each client, which counts half after HALF_LIFE_SECONDS. Mutable: remembers the
    MAX_CLIENTS that used it last."""

    def __init__(self) -> None:
        self._taken: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # seconds, and the time of the last use

    def add(self, client: str, seconds: float) -> None:
        self._taken[client] = self.of(client) + seconds, time.monotonic()
        self._taken.move_to_end(client)
        if len(self._taken) > MAX_CLIENTS:
            self._taken.popitem(last=False)

    def of(self, client: str) -> float:
        seconds, when = self._taken.get(client, (0.0, 0.0))
        return seconds * 0.5 ** ((time.monotonic() - when) / HALF_LIFE_SECONDS) if seconds else 0.0
