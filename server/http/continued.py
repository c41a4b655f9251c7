"""Requests that a fleet's ingress sends, perhaps to continue an answer. They are known by a header with
the fleet's key, and begin with the events before the body."""

from __future__ import annotations

import secrets

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.engine import TokenEvent
from headway.server.base.continuation import Continuation

HEADER = "x-headway-continuation"
_decode = msgspec.json.Decoder(list[list[TokenEvent]]).decode


def header_of(key: str, name: str, created_unix: int, num_sent: int, num_bytes: int) -> str:
    """num_bytes: the length of the JSON before the body, which has the events by marks."""
    return f"{key} {name} {created_unix} {num_sent} {num_bytes}"


class ContinuedRequests:
    """Middleware around everything that reads a body. A header with another key has no meaning."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words = Headers(scope=scope).get(HEADER, "").split(" ") if scope["type"] == "http" else []
        if len(words) != 5 or not secrets.compare_digest(words[0].encode(), self._key.encode()):
            await self._app(scope, receive, send)
            return
        _, name, created_unix, num_sent, num_bytes = words
        before, rest = await _split(receive, int(num_bytes))
        told = [event for events in _decode(before) for event in events] if before else []
        scope["state"]["continuation"] = Continuation(
            name, int(created_unix), told, int(num_sent), keeps_journal=True
        )
        # The announced length includes the events before the body.
        headers = [(key, value) for key, value in scope["headers"] if key != b"content-length"]
        messages = iter((rest,))

        async def receive_rest() -> Message:
            return next(messages, None) or await receive()

        await self._app({**scope, "headers": headers}, receive_rest, send)


async def _split(receive: Receive, num_bytes: int) -> tuple[bytes, Message]:
    """Returns this many bytes of the body, and a message with the bytes that arrived after them."""
    body = bytearray()
    message: Message = {"type": "http.request", "more_body": True}
    while len(body) < num_bytes and message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        body += message.get("body", b"")
    return bytes(body[:num_bytes]), {**message, "body": bytes(body[num_bytes:])}
