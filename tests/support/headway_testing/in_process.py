"""The real engine inside the test's own process, under the interface that the API process has of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec

from headway.engine import Abort, EngineStats, FinishReason, RoundOutput, StatsSnapshot, Submit
from headway.engine.protocol.config import EngineConfig
from headway.server.engine.client import EngineStatus
from headway.server.engine.flights import Receiver
from headway_testing.local import LocalEngine


class InProcessEngine:
    """Mutable: steps in a task while requests are in flight; every frame is encoded and decoded on its
    way."""

    def __init__(self, config: EngineConfig, *, reads_late: bool = False) -> None:
        self.local = LocalEngine(config, reads_late=reads_late)
        self.info = self.local.engine.info
        self.stats = EngineStats()
        self._receivers: dict[int, Receiver] = {}
        self._ids = itertools.count()
        self._has_work = asyncio.Event()

    def status(self) -> EngineStatus:
        return EngineStatus("serving", "serve", 1.0, 0, 0.0, True, 0)

    def new_request_id(self) -> int:
        return next(self._ids)

    def submit(self, requests: Sequence[Submit], receiver: Receiver) -> None:
        frame = msgspec.msgpack.encode(list(requests))
        self.local.post.inbox += msgspec.msgpack.decode(frame, type=list[Submit])
        self._receivers |= dict.fromkeys([request.request_id for request in requests], receiver)
        self._has_work.set()

    def abort(self, request_ids: Iterable[int], reason: FinishReason = FinishReason.ABORT) -> None:
        ids = [i for i in request_ids if self._receivers.pop(i, None) is not None]
        self.local.post.inbox += [Abort(i, reason) for i in ids]
        self._has_work.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[InProcessEngine]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            if not (self.local.engine.scheduler.has_work or self.local.post.inbox):
                self._has_work.clear()
                await self._has_work.wait()
            self.step()
            await asyncio.sleep(0)

    def step(self) -> None:
        """Runs one turn of the engine's loop, and delivers what it sent."""
        self.local.loop.step()
        sent, self.local.post.sent = self.local.post.sent, []
        for message in sent:
            if isinstance(message, StatsSnapshot):
                self.stats = message.stats
            elif isinstance(message, RoundOutput):
                frame = msgspec.msgpack.encode(message)
                self._deliver(msgspec.msgpack.decode(frame, type=RoundOutput))

    def _deliver(self, output: RoundOutput) -> None:
        for event in output.events:
            if (receiver := self._receivers.get(event.request_id)) is not None:
                if event.finish_reason is not None:
                    del self._receivers[event.request_id]
                receiver.put(event)
