"""uvicorn's HTTP protocol with bounds on what a client may leave half done: headers, and reading its answer."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.cli.listening import connection_limits
from headway.server.guard import MAX_HEADER_BYTES

HEAD_SECONDS = 60.0  # from the connection, or the first byte of a further request, to complete headers
STALLED_SECONDS = 60.0  # an answer waits so long for a client that has stopped reading


class BoundedHttpProtocol(HttpToolsProtocol):
    """Mutable as its base: one connection. The guard refuses too many headers politely once they are complete;
    this closes a connection whose headers never are. A connection that is aborted ends its request as any
    disconnect does. Requests of connections beyond what descriptors allow for are marked, and the guard refuses
    them; connections far beyond are closed at once."""

    _num_head_bytes = 0
    _has_head = False
    _is_crowded = False
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        max_served, max_told = connection_limits()
        self._is_crowded = len(self.connections) > max_served
        if len(self.connections) > max_told:
            transport.abort()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_stall_timer()
        self._unset_keepalive_if_required()  # the base forgets it when a client resets: it would keep all this alive
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_head_bytes = 0 if self._has_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._has_head = False
        self._await_head()
        super().on_message_begin()
        self._is_crowded = self._is_crowded and len(self.connections) > connection_limits()[0]
        self.scope["state"]["is_crowded"] = self._is_crowded

    def on_headers_complete(self) -> None:
        self._has_head = True
        self._stop_head_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
