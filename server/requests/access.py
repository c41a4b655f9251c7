"""The record of an HTTP request, which is counted and logged in one line when the request ends.

The line has ids, counts, times, and the code and field of an error, but never a prompt or a text.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.base.errors import ApiError, noted_error
from headway.server.http.page import PAGE_PATHS
from headway.server.requests.answer import Answer
from headway.server.telemetry.metrics import Metrics, endpoint_of

CLIENT_GONE = 499  # nginx's status for clients that disconnected before the answer began

FIELD_PATH = re.compile(r"[\w.$\[\]-]{1,128}", re.ASCII)
IGNORED = "X-Headway-Ignored"
_PARTS = re.compile(r"[.\[]")  # the characters after the path of an object or a list
MAX_TOLD = 32  # ignored fields in the header

# Requests that probes and scrapers repeat all the time are logged only if their outcome is news.
PROBE_METHODS = ("GET", "HEAD")
PROBE_PATHS = PAGE_PATHS | {
    "/", "/dashboard/data", "/favicon.ico", "/health", "/health/generate", "/load", "/metrics", "/ping", "/ready",
    "/version",
}  # fmt: skip
MAX_REMEMBERED = 1024  # pairs of path and client
Outcome = tuple[int, str | None]  # status and code of the error

logger = logging.getLogger("headway.access")


@dataclass(slots=True)
class RequestRecord:
    """The record of one request. Mutable: the middleware writes status, error and ended_seconds, the route
    its answer and model. Seconds are monotonic.

    endpoint: the metrics' name of it. model: the served name in the request, or the first one. error: the
    error that the client was told, by status or as an event of a stream. ignored: paths of accepted fields
    without effect; `tell_ignored` adds to it before the answer starts, and a header reports it.
    """

    request_id: str
    method: str
    path: str
    endpoint: str
    model: str
    started_seconds: float = field(default_factory=time.monotonic)
    ended_seconds: float = 0.0
    status: int = CLIENT_GONE
    answer: Answer | None = None
    error: ApiError | None = None
    ignored: list[str] = field(default_factory=list)
    traceparent: str | None = None  # the caller's W3C header


def record_of(request: Request) -> RequestRecord:
    record = request.state.record
    assert isinstance(record, RequestRecord)
    return record


class Probes:
    """Decides which outcomes of probes are news: the beginning, change or end of a failure, for each client.

    Mutable: the access log is its only writer.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], Outcome] = {}

    def is_news(self, path: str, client: str, outcome: Outcome) -> bool:
        """client: its address without the port, which changes with each probe."""
        key, is_failure = (path, client), outcome[0] >= 400
        previous = self._failures.pop(key, None)
        if is_failure:
            self._failures[key] = outcome
            if len(self._failures) > MAX_REMEMBERED:
                del self._failures[next(iter(self._failures))]
        return previous != (outcome if is_failure else None)


class AccessLog:
    """Middleware around everything that answers; RequestIds, which is around it, has set the id. trace: is
    called with each record."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        model: str,
        trace: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._model = model
        self._probes = Probes()
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        path = scope["path"]
        record = RequestRecord(state["request_id"], scope["method"], path, endpoint_of(path), self._model)
        state["record"] = record
        record.traceparent = Headers(scope=scope).get("traceparent")

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if told := _told(record.ignored):
                    MutableHeaders(scope=message)[IGNORED] = told
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            record.ended_seconds = time.monotonic()
            record.error = noted_error(scope)
            self._metrics.count_response(record.endpoint, record.status)
            if record.error is not None:
                self._metrics.count_error(record.error.code)
            _log(record, is_news=self._is_news(record, scope))
            if self._trace is not None:
                self._trace(record)

    def _is_news(self, record: RequestRecord, scope: Scope) -> bool:
        if record.path not in PROBE_PATHS or record.method not in PROBE_METHODS:
            return True
        client, code = scope.get("client"), record.error.code if record.error is not None else None
        return self._probes.is_news(record.path, client[0] if client else "", (record.status, code))


def _told(paths: Sequence[str]) -> str:
    """Returns the paths as a header's value, without those within others. Clients choose unknown names
    freely, so that anything but a name is left out."""
    names = dict.fromkeys(path for path in paths if FIELD_PATH.fullmatch(path))
    outermost = [path for path in names if not any(path[: m.start()] in names for m in _PARTS.finditer(path))]
    return ", ".join(outermost[:MAX_TOLD])


def _log(record: RequestRecord, *, is_news: bool) -> None:
    level = logging.INFO if is_news else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    fields = request_fields(record)
    told = " ".join(f"{name}={_plain(value)}" for name, value in fields.items() if value is not None)
    logger.log(level, "%s", told, extra={"fields": fields})


def request_fields(record: RequestRecord) -> dict[str, object]:
    """Returns the fields of the line; those of the generation only if one began."""
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.ended_seconds - record.started_seconds, 6),
    }
    if record.answer is not None:
        fields |= _generation_fields(record.answer)
    if record.error is not None:
        fields |= {"error_code": record.error.code, "error_param": error_param(record.error)}
    return fields


def error_param(error: ApiError) -> str | None:
    """Returns the path of the field at fault. Clients choose unknown names freely, so that anything but a
    name is left out."""
    return error.param if error.param is not None and FIELD_PATH.fullmatch(error.param) else None


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
    """Returns lists as words with commas; text with spaces or line breaks in quotes."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isprintable() and " " not in text else repr(text)
