"""One life of the engine process: its socket, its frames, its end. It knows no requests and never restarts
the process.

The API process binds a PAIR socket in a private folder; the child connects and gets its configuration.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec
import zmq

from headway.engine import (
    Configure,
    EngineConfig,
    Failure,
    FromEngine,
    Heartbeat,
    Ready,
    Shutdown,
    ToEngine,
    TokenTable,
)
from headway.server.engine.child import ENGINE_COMMAND, EngineChild
from headway.server.engine.process_signs import TICKS_PER_SECOND, has_stopped, processor_ticks

LAST_WORDS_SECONDS = 0.25  # how long a Failure may trail the exit of the process that sent it
# Other tasks of the event loop run after this many frames: an engine may send them faster than they are
# handled.
FRAMES_AT_ONCE = 4
STACKS_SECONDS = 0.5  # for a stuck process to write its stacks
# The share of a processor that a waiting process may use for polling: a rank that waits for another one uses
# half a percent.
IDLE_SHARE = 0.02

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class Patience:
    """How many seconds the engine may give no sign of life before it counts as stuck, and how many it has to
    leave.

    serve_seconds: while it serves, without a frame from it and without processor time used by its session. An
    engine of which a process is stopped (SIGSTOP) has this time in any phase. step_seconds: without a frame
    though it computes, which is the longest that one step may take. load_seconds: the same before it serves,
    since importing libraries from a cold disk is silent for a while.
    """

    load_seconds: float = 300.0
    serve_seconds: float = 10.0
    shutdown_seconds: float = 10.0
    step_seconds: float = 60.0

    @property
    def look_seconds(self) -> float:
        """Returns the time between two checks of the process."""
        return min(0.5, self.serve_seconds / 8)


class EngineProcess:
    """Mutable: owned by the engine client; frames go to `receive` as they arrive. The constructor may
    raise OSError."""

    def __init__(
        self,
        config: EngineConfig,
        receive: Callable[[FromEngine], None],
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        patience: Patience | None = None,
        token_table: TokenTable | None = None,
        child: EngineChild | None = None,
    ) -> None:
        """child: a process that was started already, which is closed together with this object; None
        starts one by `command`."""
        self._config = config
        self._token_table = token_table
        self._receive = receive
        self._command = command
        self._patience = patience or Patience()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        try:
            self._context = zmq.Context()
            self._socket = self._context.socket(zmq.PAIR)
        except zmq.ZMQError as error:
            raise OSError(f"no socket to the engine can be had: {error}") from error
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._taken = ExitStack()
        self._taken.callback(self._context.term)
        self._taken.callback(self._socket.close)
        self._is_configured = self._will_read = False
        self._failure: Failure | None = None
        self._process = child
        self._heard_seconds = self._sign_seconds = self._looked_seconds = time.monotonic()
        self._ticks: int | None = None
        self._ticks_seconds = self._looked_seconds  # the time of the last change
        self._is_stuck = False
        self.heartbeat = Heartbeat("load", 0.0)

    @property
    def heartbeat_age_seconds(self) -> float:
        return time.monotonic() - self._heard_seconds

    @property
    def is_alive(self) -> bool:
        """Returns whether the process has not been found stuck, and is not about to be."""
        return not self._is_stuck and self._why_stuck() is None

    @property
    def _child(self) -> EngineChild:
        assert self._process is not None, "start() comes first"
        return self._process

    async def start(self) -> None:
        """Raises OSError; `close` then frees what was allocated."""
        loop = asyncio.get_running_loop()
        self._process = self._process or EngineChild(self._command)
        try:
            self._socket.bind(self._process.address)
        except zmq.ZMQError as error:
            raise OSError(f"{error} (is TMPDIR too long a path?)") from error
        loop.add_reader(self._socket.fileno(), self._read)
        self._taken.callback(loop.remove_reader, self._socket.fileno())

    def send(self, message: ToEngine) -> None:
        """Sends a frame. Frames to a process that has just ended are lost; `ended` reports its end."""
        with suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        # Sending may swallow the edge that would have announced frames to read.
        self._read_soon()

    async def ended(self) -> Failure:
        """Waits until the process leaves or is stuck, and kills it if it is stuck. Returns why it ended.

        `receive` gets the failure of a stuck process as well, before the process has ended.
        """
        exit_code = asyncio.ensure_future(self._child.wait())
        while not exit_code.done():
            await asyncio.wait([exit_code], timeout=self._patience.look_seconds)
            if exit_code.done() or self._is_stuck:
                continue
            self._look()
            reason = self._why_stuck()
            if reason is not None:
                self._is_stuck = True
                self._failure = self._failure or Failure("crash", reason)
                await self._show_stacks(exit_code)
                self._receive(self._failure)
                self._child.kill()
        await self._hear_last_words(exit_code.result())
        return self._failure or Failure("crash", _describe_exit(exit_code.result()))

    def _look(self) -> None:
        """Notes whether the process has given a sign of life since the last check.

        If this process was itself stopped in between, the silence says nothing about the engine.
        """
        now = time.monotonic()
        if now - self._looked_seconds > self._patience.serve_seconds / 2:
            self._heard_seconds = self._sign_seconds = now
        self._looked_seconds = now
        if now - self._sign_seconds < self._patience.serve_seconds / 4:
            self._ticks = None  # its frames are sign enough
            return
        ticks = processor_ticks(self._child.pid)
        if self._ticks is None:
            self._ticks, self._ticks_seconds = ticks, now
        most_idle = 1 + IDLE_SHARE * TICKS_PER_SECOND * (now - self._ticks_seconds)
        is_busy = ticks is None or self._ticks is None or abs(ticks - self._ticks) > most_idle
        # A process of the session may compute while it waits for a stopped one.
        if is_busy and not self._is_halted():
            self._sign_seconds = now

    def _why_stuck(self) -> str | None:
        """Returns why the process counts as stuck; None if it does not."""
        now, patience = time.monotonic(), self._patience
        num_silent, num_unheard = now - self._sign_seconds, now - self._heard_seconds
        is_serving = self.heartbeat.phase == "serve"
        is_silent = num_silent > patience.serve_seconds
        is_halted = is_silent and self._is_halted()
        if is_halted or (is_silent and is_serving):
            halted, idle = (
                "a process of it is stopped (SIGSTOP?)",
                "its process used next to no processor time",
            )
            state = halted if is_halted else idle
            return (
                f"the engine gave no sign of life for {patience.serve_seconds:g} s (--engine-timeout) and {state}; "
                "it is being replaced"
            )
        longest = max(patience.step_seconds, patience.serve_seconds) if is_serving else patience.load_seconds
        if num_unheard > longest:
            return (
                f"the engine gave no sign of life for {longest:g} s, though its process lives; where its threads stand "
                "is on stderr; it is being replaced"
            )
        return None

    def _is_halted(self) -> bool:
        """Returns whether the process is stopped, or another one of its session, such as a rank."""
        return self._process is not None and has_stopped(self._process.pid)

    async def _show_stacks(self, exit_code: asyncio.Future[int]) -> None:
        """Makes the process write its stacks to stderr, which a stopped one cannot do."""
        if not self._is_halted():
            self._child.send_signal(signal.SIGUSR1)
            await asyncio.wait([exit_code], timeout=STACKS_SECONDS)

    async def stop(self) -> None:
        """Asks the process to leave, then kills it. Returns when it has ended."""
        if self.heartbeat.phase == "serve":  # before that the engine reads no frames
            self.send(Shutdown())
            await self._wait_for_exit()
        self._child.send_signal(signal.SIGTERM)
        await self._wait_for_exit()
        self._child.kill()
        await self._child.wait()

    def close(self) -> None:
        """Kills the process if it has not ended, and frees its resources."""
        self._taken.close()
        if self._process is not None:
            self._process.close()

    def _read(self) -> None:
        """Handles some frames. The socket's descriptor signals changes, not frames, so that this schedules
        itself while frames wait."""
        self._will_read = False
        if self._take_frames(FRAMES_AT_ONCE):
            self._read_soon()

    def _read_soon(self) -> None:
        if not self._will_read:
            self._will_read = True
            asyncio.get_running_loop().call_soon(self._read)

    def _take_frames(self, most: int) -> bool:
        """Returns whether more frames may wait. A frame that cannot be handled ends this life: requests
        would wait for it for ever."""
        for _ in range(most):
            events = 0 if self._socket.closed else int(self._socket.getsockopt(zmq.EVENTS))
            if not events & zmq.POLLIN:
                if events & zmq.POLLOUT and not self._is_configured:
                    self._is_configured = True
                    self.send(Configure(self._config, self._token_table))
                return False
            try:
                self._take(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except Exception as error:
                logger.exception("a frame of the engine could not be taken")
                self._failure = Failure("crash", f"a frame of the engine could not be taken: {error}")
                self._child.kill()
                return False
        return True

    def _take(self, message: FromEngine) -> None:
        self._heard_seconds = self._sign_seconds = time.monotonic()
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        elif isinstance(message, Ready):
            self.heartbeat = Heartbeat("serve", 1.0)
        elif isinstance(message, Failure):
            self._failure = message
        self._receive(message)

    async def _wait_for_exit(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), self._patience.shutdown_seconds)

    async def _hear_last_words(self, exit_code: int) -> None:
        deadline = time.monotonic() + (LAST_WORDS_SECONDS if exit_code > 0 else 0)
        self._take_frames(sys.maxsize)
        while self._failure is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
            self._take_frames(sys.maxsize)


def _describe_exit(exit_code: int) -> str:
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}  # real-time signals have none
        return f"the engine process was killed by signal {names.get(-exit_code, -exit_code)}"
    return f"the engine process left with status {exit_code}; its last lines on stderr say why"
