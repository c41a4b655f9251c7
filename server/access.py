"""What is kept of an HTTP request until it ends; then it is counted, and told in one line of the log.

The line has ids, counts and times, never a prompt or a text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.answer import Answer
from headway.server.metrics import Metrics

CLIENT_GONE = 499  # as nginx counts clients that hung up before the answer began
QUIET_PATHS = ("/health", "/ready", "/load", "/metrics", "/version", "/dashboard", "/favicon.ico")

logger = logging.getLogger("headway.access")


@dataclass(slots=True)
class RequestRecord:
    """Mutable: the middleware writes status and ended_seconds, the route its answer. Seconds are monotonic."""

    request_id: str
    method: str
    path: str
    started_seconds: float = field(default_factory=time.monotonic)
    ended_seconds: float = 0.0
    status: int = CLIENT_GONE
    answer: Answer | None = None
    traceparent: str | None = None  # the caller's, as W3C's header has it


def record_of(request: Request) -> RequestRecord:
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


class AccessLog:
    """Around all that answers; its own id of the request comes from around it. trace: is handed what ends."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, trace: Callable[[RequestRecord], None] | None = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        state["record"] = record = RequestRecord(state["request_id"], scope["method"], scope["path"])
        record.traceparent = Headers(scope=scope).get("traceparent")

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            record.ended_seconds = time.monotonic()
            self._metrics.count_response(record.path, record.status)
            _log(record)
            if self._trace is not None:
                self._trace(record)


def _log(record: RequestRecord) -> None:
    is_quiet = record.path.startswith(QUIET_PATHS) and record.status < 400
    level = logging.DEBUG if is_quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    fields = request_fields(record)
    told = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if value is not None)
    logger.log(level, "%s", told, extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, object]:
    """The line as fields; those of the generation only if one began."""
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.ended_seconds - record.started_seconds, 6),
    }
    return fields if record.answer is None else fields | _generation_fields(record.answer)


def _generation_fields(answer: Answer) -> dict[str, object]:
    generation = answer.generation
    counts = generation.counts()
    return {
        "id": answer.head.id,
        "stream": bool(answer.fields.stream),
        "finish_reasons": generation.outcomes,
        "error": None if generation.error is None else str(generation.error),
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": counts.num_completion_tokens,
        "drafted_tokens": counts.num_accepted + counts.num_rejected,
        "accepted_tokens": counts.num_accepted,
        "queue_seconds": _rounded(generation.queue_seconds),
        "first_token_seconds": _rounded(generation.first_token_seconds),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _plain(value: object) -> str:
    """Lists as words with commas; what has spaces, or would begin a line of its own, in quotes."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)
