"""Errors as clients see them: OpenAI's envelope, status codes and types, and Anthropic's on the paths of its
API.

HeadwayError (engine)
 └─ ApiError             a request refused by this process; carries the status and headers of the answer
     └─ ClientGoneError  the client disconnected; the response is not read
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from headway.engine import INTERNAL_ERROR, EngineDeadError, HeadwayError, QueueFullError, RequestError
from headway.server.base.unserved_paths import help_for

RETRY_AFTER = {"Retry-After": "1"}
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat every 5xx without this header
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
}

MESSAGES_PATHS = re.compile(r"/v1/messages(/.*)?")
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# Every code that an error may have; a metric counts by them. A test compares them with the code.
CODES = (
    "aborted", "admin_key_not_set", "body_too_large", "body_too_slow", "chat_not_supported",
    "chat_template_error", "chat_template_unavailable", "context_length_exceeded", "engine_unavailable", "grammar_unavailable",
    "headers_too_large", "host_not_allowed", "internal_error", "invalid_api_key", "invalid_content_encoding",
    "invalid_encrypted_content", "invalid_grammar", "invalid_json", "invalid_type", "invalid_value", "method_not_allowed", "missing_required_parameter",
    "model_not_found", "not_found", "origin_not_allowed", "priority_not_allowed", "queue_full",
    "request_timeout", "structural_token", "thread_unsupported_request", "too_many_bytes", "too_many_connections", "too_much_text",
    "unknown_parameter", "unsupported_content", "unsupported_content_encoding", "unsupported_endpoint",
    "unsupported_parameter",
)  # fmt: skip

_MAX_MESSAGE = 2000  # characters: a message may repeat what the client sent

logger = logging.getLogger("headway.server")


class ApiError(HeadwayError):
    """A refused or failed request. param: the field at fault; code: OpenAI's machine-readable word."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(_shortened(message))
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def _shortened(message: str) -> str:
    """Returns the message without its middle if it is too long; the remedy is at the end."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


class ClientGoneError(ApiError):
    """The client disconnected before the answer was complete."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection", status=499)


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


class MessagesErrorDetails(msgspec.Struct):
    error_code: str | None
    param: str | None


class MessagesErrorBody(msgspec.Struct):
    type: str
    message: str
    details: MessagesErrorDetails


class MessagesErrorEnvelope(msgspec.Struct, tag_field="type", tag="error"):
    """Anthropic's envelope of an error."""

    error: MessagesErrorBody
    request_id: str


def as_api_error(error: Exception) -> ApiError:
    """Returns the error that a client gets for an exception."""
    if isinstance(error, HeadwayError):  # others are logged with their traceback
        forget_frames(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", headers=RETRY_AFTER)
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        return ApiError(str(error), status=503, code="engine_unavailable", headers=RETRY_AFTER)
    if isinstance(error, HTTPException):
        return ApiError(error.detail, status=error.status_code, headers=error.headers)
    message = "the server failed on this request; its log has the details"
    return ApiError(message, status=500, code=INTERNAL_ERROR)


def is_messages(scope: Scope) -> bool:
    """Returns whether the path is one of Anthropic's API, whose clients know its envelope alone."""
    return MESSAGES_PATHS.fullmatch(scope["path"]) is not None


def envelope(error: ApiError, scope: Scope) -> bytes:
    """Returns the JSON body of an error, which is also the payload of an error event in a stream."""
    if is_messages(scope):
        kind = _MESSAGES_TYPES.get(error.status, "invalid_request_error")
        body = MessagesErrorBody(kind, str(error), MessagesErrorDetails(error.code, error.param))
        return msgspec.json.encode(MessagesErrorEnvelope(body, scope["state"]["request_id"]))
    kind = _TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode(ErrorEnvelope(ErrorBody(str(error), kind, error.param, error.code)))


class ErrorResponse(Response):
    """The answer to a request that is refused or has failed. It notes the error for the request's record
    when it is sent."""

    media_type = "application/json"

    def __init__(self, error: ApiError, scope: Scope) -> None:
        super().__init__(envelope(error, scope), error.status, dict(error.headers or {}))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, error: ApiError) -> None:
    """Stores the error that the client is told, which the access log reads when the request ends."""
    if not isinstance(error, ClientGoneError):
        scope.setdefault("state", {})["error"] = error


def forget_frames(error: BaseException) -> None:
    """Drops the traceback of a handled error. Its frames hold the request's body, and the request holds
    the error, so that only the garbage collector would free them."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def noted_error(scope: Scope) -> ApiError | None:
    error = scope["state"].get("error")
    return error if isinstance(error, ApiError) else None


def install_error_handlers(app: FastAPI) -> None:
    """Gives every answer that is not a success the envelope, including 404, 405 and unexpected exceptions."""
    for kind in (HeadwayError, HTTPException, Exception):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = _unsupported(request.url.path) or ApiError(
            f"there is no {request.url.path} here", status=404, code="not_found"
        )
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = ", ".join(sorted(_allowed_methods(request)))
        message = f"{request.method} is not allowed on {request.url.path}; allowed: {allowed}"
        error = ApiError(message, status=405, code="method_not_allowed", headers={"Allow": allowed})
    return ErrorResponse(as_api_error(error), request.scope)


def _unsupported(path: str) -> ApiError | None:
    """Returns a refusal with status 400: proxies such as LiteLLM take a server that answers 404 out of
    service for everybody."""
    instead = help_for(path.removesuffix("/"))
    if instead is None:
        return None
    return ApiError(f"{path} is not served here: {instead}", code="unsupported_endpoint")


def _allowed_methods(request: Request) -> set[str]:
    """Returns the methods of all routes of the path; the exception knows only the first route's."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}
