"""Answers that take long: server-sent events and JSON, both given up as soon as the client hangs up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.errors import ClientGoneError, as_api_error, envelope

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Result = TypeVar("Result")
logger = logging.getLogger("headway.server")


class EventStreamResponse(Response):
    """Sends events as they come. A fault before the first is an HTTP error; a later one is an event.

    Mutable: `events` is run through once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):  # nobody is left to tell
            await unless_disconnected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, DONE)
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
            await _send_body(send, first)
            try:
                async for event in events:
                    await _send_body(send, event)
            except Exception as error:  # noqa: BLE001 - the status line is sent; an event is what is left
                await _send_body(send, _error_event(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work; cancels it when the client hangs up first (ClientGoneError)."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGoneError
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _error_event(error: Exception) -> bytes:
    api_error = as_api_error(error)
    if api_error.status == 500:
        logger.error("a stream failed", exc_info=error)
    return b"data: " + envelope(api_error) + b"\n\n"
