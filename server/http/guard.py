"""Middleware that every request passes before its route: request ids, the limit on headers, allowed
origins, and keys."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.base.errors import RETRY_AFTER, ApiError, ErrorResponse, is_messages
from headway.server.base.worker_pool import CLIENT
from headway.server.http.keys import Keys, credentials
from headway.server.http.origins import AllowedOrigins
from headway.server.http.page import PAGE_PATHS

REQUEST_ID = "X-Request-Id"
MAX_HEADER_BYTES = 64 * 1024
READ_PATHS = PAGE_PATHS | {"/", "/favicon.ico"}  # pages of any origin may link to these
# Browsers, probes and scrapers have no keys.
OPEN_PATHS = READ_PATHS | {"/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json"}
_USABLE_ID = re.compile(r"[!-~]{1,128}")


class RequestIds:
    """Gives each request an id: the client's X-Request-Id if it is usable, else a drawn one. The answer
    repeats it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _USABLE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if is_messages(scope):
                    headers["request-id"] = request_id  # where Anthropic's clients look for it
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadAsGet:
    """Answers a HEAD request like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = b""
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)


class Guard:
    """Refuses requests that must not reach a route."""

    def __init__(self, app: ASGIApp, keys: Keys, origins: AllowedOrigins) -> None:
        self._app = app
        self._keys = keys
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await ErrorResponse(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEADER_BYTES:
            message = f"the headers have {size} bytes, the limit is {MAX_HEADER_BYTES}; send fewer"
            raise ApiError(message, status=431, code="headers_too_large")
        headers = Headers(scope=scope)
        self._origins.check_host(headers)
        if scope["path"] not in READ_PATHS or scope["method"] not in ("GET", "HEAD"):
            self._origins.check_origin(headers)
        if scope["path"] in OPEN_PATHS:
            return
        if scope["state"].get("is_crowded"):
            message = "the server has as many connections as its file descriptors allow for; try again later"
            closing = {**RETRY_AFTER, "Connection": "close"}
            raise ApiError(message, status=503, code="too_many_connections", headers=closing)
        self._keys.check(credentials(headers))
        CLIENT.set(self._keys.owner(credentials(headers)) or (scope.get("client") or ("",))[0])
