"""The body of a request as an object of its kind, and what of it has no effect."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request

from headway.server.protocol.decoding import decode
from headway.server.requests.access import FIELD_PATH, record_of
from headway.server.requests.body import read_body
from headway.server.requests.services import services_of
from headway.server.text.reasoning_effort import is_without_effect

THREAD_BYTES = 256 * 1024  # longer bodies are read off the event loop
MAX_LOGGED = 256  # names of ignored fields, of which the log tells each once

Body = TypeVar("Body", bound=msgspec.Struct)

logger = logging.getLogger("headway.server")


async def body_of(request: Request, kind: type[Body]) -> Body:
    """Raises ApiError that names what is wrong. What has no effect is told in the answer's headers."""
    ignored: list[str] = []
    refuses_unknown = services_of(request).limits.refuses_unknown_fields
    raw = await read_body(request)
    read = partial(decode, raw, kind, ignored, refuses_unknown=refuses_unknown)
    body = read() if len(raw) <= THREAD_BYTES else await asyncio.to_thread(read)
    tell_ignored(request, *ignored)
    return body


def tell_ignored(request: Request, *paths: str) -> None:
    """The paths are those of fields that the request has and that have no effect."""
    record_of(request).ignored.extend(paths)
    logged = services_of(request).logged_fields
    for path in paths:
        name = path.rpartition(".")[2]
        if name not in logged and len(logged) < MAX_LOGGED and FIELD_PATH.fullmatch(path):
            logged.add(name)
            logger.info(
                "the field %s of a request has no effect here; the log tells each such name once", path
            )


def tell_ignored_effort(request: Request, effort: str | None, path: str) -> None:
    """The effort is a chat's, path the field that brought it."""
    services = services_of(request)
    thinks = services.output_format.thinking_end is not None
    if is_without_effect(effort, services.template_source, thinks=thinks):
        tell_ignored(request, path)
