"""The ingress: HTTP requests as they come, forwarded to replicas; answers as they come, forwarded to clients.

Knows no Ray: it is given the function that sends a request to a replica.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from headway.server.base.errors import RETRY_AFTER, ApiError, ClientGoneError, ErrorResponse
from headway.server.fleet.messages import ForwardedRequest, ResponseStart, end_to_end
from headway.server.fleet.ring import prompt_key
from headway.server.http.guard import REQUEST_ID
from headway.server.http.sse import unless_disconnected

UNAVAILABLE = "the replica that served this request has ended; try again"


class Stream(Protocol):
    """What a replica yields: a ResponseStart, then the rest of the body."""

    def __aiter__(self) -> AsyncIterator[ResponseStart | bytes]: ...
    def cancel(self) -> object: ...


@dataclass(frozen=True, slots=True)
class Replicas:
    """forward: sends a request to a replica of the router's choice. broken: what the stream raises where the
    replica has ended. max_body_bytes: of a request; a body is cut behind it, which the server refuses in its
    own words."""

    forward: Callable[[ForwardedRequest], Stream]
    broken: tuple[type[Exception], ...]
    max_body_bytes: int


class Proxy:
    """An ASGI application that has every path."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect, ClientGoneError):
            request = await _read(Request(scope, receive), self._replicas.max_body_bytes)
            await unless_disconnected(receive, self._send(request, scope, receive, send))

    async def _send(self, request: ForwardedRequest, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        stream = self._replicas.forward(request)
        try:
            async for part in stream:
                if isinstance(part, ResponseStart):
                    is_started = True
                    await send(
                        {"type": "http.response.start", "status": part.status, "headers": part.headers}
                    )
                body = part.body if isinstance(part, ResponseStart) else part
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except self._replicas.broken:
            if is_started:
                raise  # the client sees that the answer is incomplete
            await _unavailable(scope)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            stream.cancel()


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
        request.method, target, end_to_end(scope["headers"]), content, prompt_key(content) if content else b""
    )


def _unavailable(scope: Scope) -> ErrorResponse:
    scope.setdefault("state", {}).setdefault("request_id", Headers(scope=scope).get(REQUEST_ID, ""))
    error = ApiError(UNAVAILABLE, status=503, code="engine_unavailable", headers=RETRY_AFTER)
    return ErrorResponse(error, scope)
