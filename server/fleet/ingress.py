"""The ingress: forwards HTTP requests to replicas and their answers to clients, part by part.

A stream whose replica ends is continued by another one. Any other answer begins anew as long as the client
has received nothing of it: all its draws are the same. This module knows no Ray: it is given the function
that sends a request to a replica.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from headway.server.base.errors import RETRY_AFTER, ApiError, ClientGoneError, ErrorResponse
from headway.server.fleet.messages import ForwardedRequest, Part, ReplicaError, ResponseStart, end_to_end
from headway.server.fleet.ring import prompt_key
from headway.server.http.guard import REQUEST_ID
from headway.server.http.sse import unless_disconnected

MAX_CONTINUATIONS = 2  # of a request; a request that ends replicas must not end all of them
UNAVAILABLE = "the replica that served this request has ended; try again"

logger = logging.getLogger("headway.server")


class Stream(Protocol):
    """The parts that a replica yields: a ResponseStart, then the rest of the body."""

    def __aiter__(self) -> AsyncIterator[ResponseStart | Part]: ...
    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Replicas:
    """forward: sends a request to a replica that the router chooses. broken: the exceptions of the stream
    if the replica has ended. max_body_bytes: the limit of a request's body; a longer one is cut after one
    more byte, which the server refuses in its own words."""

    forward: Callable[[ForwardedRequest], Stream]
    broken: tuple[type[Exception], ...]
    max_body_bytes: int


class Proxy:
    """An ASGI application that serves every path."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect, ClientGoneError):
            request = await _read(Request(scope, receive), self._replicas.max_body_bytes)
            await unless_disconnected(receive, self._send(request, scope, receive, send))

    async def _send(self, request: ForwardedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer. If a replica ends, another one continues."""
        sent = Sent(send)
        for num_tries_left in range(MAX_CONTINUATIONS, -1, -1):
            try:
                await self._try(request, sent)
                return
            except self._replicas.broken as error:
                if not sent.can_go_on or not num_tries_left:
                    if sent.is_started:
                        raise  # the client sees that the answer is incomplete
                    await _unavailable(scope)(scope, receive, send)
                    return
                logger.warning("a replica has ended; its request goes on in another: %s", error)
            request = replace(request, told=tuple(sent.told), num_sent=sent.num_sent)

    async def _try(self, request: ForwardedRequest, sent: Sent) -> None:
        stream = self._replicas.forward(request)
        try:
            async for part in stream:
                await sent.add(part)
            await sent.end()
        finally:
            stream.cancel()


class Sent:
    """The state of one answer at the client. Mutable: its proxy adds to it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False
        self.can_go_on = True
        self.told: list[bytes] = []
        self.num_sent = 0

    async def add(self, received: ResponseStart | Part) -> None:
        """Raises ReplicaError if the answer of a further replica cannot continue the stream."""
        if isinstance(received, ResponseStart):
            if not self.is_started:
                await self._start(received)
            elif not received.is_journaled:
                raise ReplicaError(f"another replica has refused the rest with status {received.status}")
            received = received.first
        self.told += received.told
        self.num_sent = max(self.num_sent, received.num_sent)
        if received.body:
            await self._send({"type": "http.response.body", "body": received.body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _start(self, start: ResponseStart) -> None:
        self.is_started, self.can_go_on = True, start.is_journaled
        await self._send({"type": "http.response.start", "status": start.status, "headers": start.headers})


async def _read(request: Request, limit: int) -> ForwardedRequest:
    """Raises ClientDisconnect."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            del body[limit + 1 :]
            break
    scope = request.scope
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    target = (path + query).decode("latin-1")
    content = bytes(body)
    return ForwardedRequest(
        request.method,
        target,
        end_to_end(scope["headers"]),
        content,
        prompt_key(content) if content else b"",
        name=secrets.token_hex(16),
        created_unix=int(time.time()),
    )


def _unavailable(scope: Scope) -> ErrorResponse:
    scope.setdefault("state", {}).setdefault("request_id", Headers(scope=scope).get(REQUEST_ID, ""))
    error = ApiError(UNAVAILABLE, status=503, code="engine_unavailable", headers=RETRY_AFTER)
    return ErrorResponse(error, scope)
