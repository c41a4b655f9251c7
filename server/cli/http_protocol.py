"""uvicorn's HTTP protocol with additions: bounds on slow clients, ignored upgrades, framing for HTTP/1.0,
and orderly ends of connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, Scope

from headway.server.cli.listening import connection_limits
from headway.server.http.guard import MAX_HEADER_BYTES

HEAD_SECONDS = (
    60.0  # from the connection, or from the first byte of a further request, to the end of the headers
)
STALLED_SECONDS = 60.0  # how long an answer waits for a client that has stopped reading
LINGER_SECONDS = 2.0  # for the rest of a body that was answered before its end
# A client that sends nothing more either waits or is gone. An interim answer after this time, and then after
# twice the time each, finds out.
PROBE_SECONDS = 1.0
CLOSE_SECONDS = 1.0  # how long a shutdown waits for the peer to confirm the end of a TLS connection
UPGRADE_FIELDS = (
    b"upgrade",
    b"http2-settings",
)  # these are removed, also as options of the header Connection


class UnframedApp:
    """Runs the application for a client of HTTP/1.0, which does not know chunked encoding.

    A body without a length ends with the connection. Mutable: sets the framing of the cycle, which is its
    own.
    """

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._has_length = False

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_unframed(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                self._has_length = any(name.lower() == b"content-length" for name, _ in headers)
                if not self._has_length:
                    self._cycle.keep_alive = self._cycle.chunked_encoding = False
                elif self._cycle.keep_alive:
                    message["headers"] = [*headers, (b"connection", b"keep-alive")]
            elif message["type"] == "http.response.body" and not self._has_length:
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_unframed)


class CancellableApp:
    """Runs the application for a request that may outlast the server, which then cancels it.

    uvicorn would log the cancellation as an error of the application, with its traceback.
    """

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            cycle = self._cycle
            cycle.logger.warning(
                "%s %r was not complete when the server ended", cycle.scope["method"], cycle.scope["path"]
            )
            cycle.disconnected = True
            cycle.transport.abort()


class LingeringApp:
    """Runs the application for a request that may be answered before its body has arrived.

    Closing a connection on which bytes still arrive resets it, and the client loses the answer.
    """

    def __init__(
        self, app: ASGI3Application, cycle: RequestResponseCycle, linger: Callable[[bool], None]
    ) -> None:
        """linger: called after an early answer, with whether the connection ends with it."""
        self._app = app
        self._cycle = cycle
        self._linger = linger

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def send_and_linger(message: ASGISendEvent) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            is_early, ends = is_last and self._cycle.more_body, not self._cycle.keep_alive
            if is_early:
                self._cycle.keep_alive = True  # otherwise the base closes at once
            await send(message)
            if is_early:
                self._linger(ends)

        await self._app(scope, receive, send_and_linger if self._cycle.more_body else send)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Mutable as its base.

    The guard refuses too many headers politely once they are complete; this class closes a connection whose
    headers never are. A connection that is aborted ends its request as any disconnect does. Requests of
    connections beyond the limit of file descriptors are marked, and the guard refuses them; connections far
    beyond it are closed at once.

    A client that half-closes the connection after complete requests still gets their answers. A client whose
    body is answered early has a little time to send the rest.

    A client that offers another protocol is served over the one that it used (RFC 9110, 7.8). The parser
    would stop after the headers of such a request and take its body for the other protocol; it is therefore
    restarted, with the same headers without the offer.
    """

    _num_head_bytes = 0
    _has_head = False
    _is_crowded = False
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _close_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    _running_cycle: RequestResponseCycle | None = None
    _is_half_closed = False  # the client sends nothing more
    _is_ending = False  # the last answer is sent
    _is_shutting_down = False

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
        for timer in (self._close_timer, self._linger_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()  # the base does not cancel it on a reset, and its timer would keep this object alive
        if self._running_cycle is not None:  # the base notifies only the last of several pipelined requests
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._parse(data)
        self._num_head_bytes = 0 if self._has_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEADER_BYTES:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open. A TLS connection ends when either side ends it."""
        is_waiting = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        self._is_half_closed = is_waiting and not self._num_head_bytes and self.scheme != "https"
        if self._is_half_closed:
            self._await_probe(PROBE_SECONDS)
        return self._is_half_closed

    def on_message_begin(self) -> None:
        self._has_head = False
        self._await_head()
        super().on_message_begin()
        self._is_crowded = self._is_crowded and len(self.connections) > connection_limits()[0]
        self.scope["state"]["is_crowded"] = self._is_crowded

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() or self._is_ending:
            return  # `_parse` feeds the headers again, without the upgrade
        self._has_head = True
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._end_lingering()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        if self._is_shutting_down:
            self._close_in_time()

    def shutdown(self) -> None:
        self._is_shutting_down = True
        super().shutdown()
        self._close_in_time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running_cycle = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.keep_alive = not self._is_shutting_down and b"keep-alive" in _connection_options(
                cycle.scope["headers"]
            )
            app = UnframedApp(app, cycle)
        if self._is_half_closed:
            self._await_probe(PROBE_SECONDS)
        super()._start_asgi_task(cycle, CancellableApp(LingeringApp(app, cycle, self._linger), cycle))

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._refuse("CONNECT is not served here.")
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = _new_parser(self)
            except httptools.HttpParserError:
                self._refuse("Invalid HTTP request received.")
                return
            else:
                return

    def _refuse(self, message: str) -> None:
        self.logger.warning(message)
        self.send_400_response(message)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in _without_upgrade(self.headers)]
        return b"\r\n".join([*lines, b"", b""])

    def _linger(self, ends: bool) -> None:
        """Ends the connection soon after an answer that came before the end of its body, or soon if the
        rest of the body does not arrive."""
        if self.transport.is_closing():
            return
        self._is_ending = ends
        if ends and self.transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _end_lingering(self) -> None:
        """Goes on after a body that ended later than its answer."""
        if self._linger_timer is None:
            return
        self._linger_timer.cancel()
        self._linger_timer = None
        if self._is_ending:
            self.transport.close()
        else:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _await_probe(self, seconds: float) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._probe_timer = self.loop.call_later(seconds, self._probe, seconds)

    def _probe(self, seconds: float) -> None:
        """Writes an interim answer, which fails if the client is gone. Once an answer has begun, its own
        writes find out."""
        cycle = self._running_cycle
        if cycle is None or cycle.response_started or cycle.scope["http_version"] == "1.0":
            return
        self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        self._await_probe(2 * seconds)

    def _close_in_time(self) -> None:
        """Ends a closing connection that has nothing left to send, whether its peer confirms the end or
        not."""
        if self.transport.is_closing() and self.scheme == "https":
            self._close_timer = self.loop.call_later(CLOSE_SECONDS, self._abort_when_sent)

    def _abort_when_sent(self) -> None:
        if self.transport.get_write_buffer_size():
            self._close_in_time()
        else:
            self.transport.abort()

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


def _new_parser(protocol: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """Returns a parser like the base's, which also reads on after a request that says `Connection: close`."""
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _connection_options(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    values = [value for name, value in headers if name == b"connection"]
    return [option.strip().lower() for value in values for option in value.split(b",")]


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            options = [
                option for option in _connection_options([(name, value)]) if option not in UPGRADE_FIELDS
            ]
            if options:
                yield name, b", ".join(options)
        elif name not in UPGRADE_FIELDS:
            yield name, value
