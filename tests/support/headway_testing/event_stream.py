"""A receiver that keeps events until they are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from headway.engine import HeadwayError, Submit, TokenEvent
from headway.server.engine.client import EngineClient


def submit(client: EngineClient, requests: Sequence[Submit]) -> EventStream:
    stream = EventStream()
    client.submit(requests, stream)
    return stream


class EventStream:
    """The events of a group of requests, in order. Mutable: filled by the client, read by one task."""

    def __init__(self) -> None:
        self._events: deque[TokenEvent] = deque()
        self._error: HeadwayError | None = None
        self._has_news = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._has_news.set()

    def fail(self, error: HeadwayError) -> None:
        self._error = error
        self._has_news.set()

    async def take(self) -> list[TokenEvent]:
        """Returns all waiting events, at least one. Once they are read it raises the error of the group."""
        await self._has_news.wait()
        if not self._events and self._error is not None:
            raise self._error
        events = list(self._events)
        self._events.clear()
        if self._error is None:
            self._has_news.clear()
        return events
