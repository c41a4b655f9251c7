"""Answers that take long: server-sent events and JSON, both cancelled as soon as the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.base.continuation import JOURNAL, Journal
from headway.server.base.errors import (
    ApiError,
    ClientGoneError,
    as_api_error,
    envelope,
    is_messages,
    note_error,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Result = TypeVar("Result")
logger = logging.getLogger("headway.server")


class EventStreamResponse(Response):
    """Sends events as they arrive. An error before the first event is an HTTP error; a later one is an event.

    keep_alive_seconds: the silence after which keep_alive is sent, a comment or an event; 0 for never.
    error_event: writes an error as the last event; None uses the envelope of the path's API. journal: the
    origin of the events, which the stream then carries, too. Mutable: `events` is iterated once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive_seconds: float = 0.0,
        keep_alive: bytes = KEEP_ALIVE,
        error_event: Callable[[ApiError], bytes] | None = None,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(headers=HEADERS if journal is None else {**HEADERS, JOURNAL: "1"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds
        self._keep_alive_event = keep_alive
        self._error_event = error_event
        self._journal = journal
        self._num_parts = 0
        self._is_started = False
        self._sent_seconds = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):  # there is no reader left
            await unless_disconnected(receive, self._send_all(scope, send))

    async def _send_all(self, scope: Scope, send: Send) -> None:
        if not self._keep_alive_seconds:
            await self._send_events(scope, send)
            return
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            await self._send_events(scope, send)
        finally:
            keeping_alive.cancel()

    async def _send_events(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    self._num_parts += 1
                    if self._journal is None or self._num_parts > self._journal.num_sent:
                        await self._send_body(send, event)
            except Exception as error:
                if not self._is_started:
                    raise
                api_error = _told(error)
                note_error(scope, api_error)
                told = (
                    _error_event(api_error, scope)
                    if self._error_event is None
                    else self._error_event(api_error)
                )
                await self._send_body(send, told)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, send: Send, body: bytes) -> None:
        self._sent_seconds = time.monotonic()
        if not self._is_started:
            self._is_started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        if self._journal is not None:
            body += self._journal.mark(self._num_parts)
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        """Sends comments. A reader that has stopped reading blocks this, too, so that comments do not pile
        up."""
        while True:
            silence = time.monotonic() - self._sent_seconds
            if silence >= self._keep_alive_seconds:
                await self._send_body(send, self._keep_alive_event)
                silence = 0.0
            await asyncio.sleep(self._keep_alive_seconds - silence)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of the work; cancels it if the client disconnects first (ClientGoneError)."""
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


def _told(error: Exception) -> ApiError:
    api_error = as_api_error(error)
    if api_error.status == 500:
        logger.error("a stream failed", exc_info=error)
    return api_error


def _error_event(error: ApiError, scope: Scope) -> bytes:
    data = b"data: " + escape_line_ends(envelope(error, scope)) + b"\n\n"
    return b"event: error\n" + data if is_messages(scope) else data


def escape_line_ends(payload: bytes) -> bytes:
    """Escapes U+0085, U+2028 and U+2029 in JSON: some clients end a line at them."""
    if b"\xe2\x80" in payload:
        payload = payload.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return payload.replace(b"\xc2\x85", b"\\u0085") if b"\xc2\x85" in payload else payload
