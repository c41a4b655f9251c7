"""Reads the body of a request up to a limit, decodes it to an object of its kind, and reports fields
without effect."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headway.server.base.errors import ApiError, ClientGoneError
from headway.server.http.content_coding import Decoder, decoder_for
from headway.server.http.unread_bodies import UnreadBody
from headway.server.protocol.decoding import decode
from headway.server.requests.access import FIELD_PATH, record_of
from headway.server.requests.services import services_of
from headway.server.text.reasoning_effort import is_without_effect

BODY_SECONDS = 60.0
CLOSING = {"Connection": "close"}  # the rest of the body will not be read
THREAD_BYTES = 256 * 1024  # longer bodies are decoded off the event loop
MAX_LOGGED = 256  # names of ignored fields, each of which is logged once

Body = TypeVar("Body", bound=msgspec.Struct)

logger = logging.getLogger("headway.server")


async def body_of(request: Request, kind: type[Body]) -> Body:
    """Raises ApiError that names the fault. Fields without effect are reported in the answer's headers."""
    ignored: list[str] = []
    refuses_unknown = services_of(request).limits.refuses_unknown_fields
    raw = await read_body(request)
    read = partial(decode, raw, kind, ignored, refuses_unknown=refuses_unknown)
    body = read() if len(raw) <= THREAD_BYTES else await asyncio.to_thread(read)
    tell_ignored(request, *ignored)
    return body


def tell_ignored(request: Request, *paths: str) -> None:
    """Reports the paths of fields of the request that have no effect."""
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
    """Reports a chat's effort if it has no effect. path: the field that it came in."""
    services = services_of(request)
    thinks = services.output_format.thinking_end is not None
    if is_without_effect(effort, services.template_source, thinks=thinks):
        tell_ignored(request, path)


async def read_body(request: Request) -> bytes:
    """Raises ApiError as soon as the limit is exceeded, or a larger length is announced. The limit holds
    for the body as it is sent and as it is decoded."""
    services = services_of(request)
    limit = services.limits.max_body_bytes
    decoder = decoder_for(request.headers.getlist("content-encoding"))
    announced = request.headers.get("content-length", "").lstrip("0")  # int() reads at most 4,300 digits
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(announced, limit)
    try:
        async with asyncio.timeout(BODY_SECONDS) as timeout:
            with services.unread_bodies.open(timeout) as unread:
                return await _read(request, limit, decoder, unread)
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        message = f"the body was not complete after {BODY_SECONDS:g} s; send it at once"
        raise ApiError(message, status=408, code="body_too_slow", headers=CLOSING) from None


async def _read(request: Request, limit: int, decoder: Decoder | None, unread: UnreadBody) -> bytes:
    body = bytearray()
    num_sent = 0
    try:
        async for part in request.stream():
            num_sent += len(part)
            body += part if decoder is None else decoder.decode(part, limit + 1 - len(body))
            if max(num_sent, len(body)) > limit:
                raise _too_large(f"over {limit}", limit)
            unread.grow(len(body))
        if decoder is not None:
            decoder.finish()
        return bytes(body)
    finally:
        body.clear()  # the traceback of an error would keep it


def _too_large(size: str, limit: int) -> ApiError:
    message = f"the body has {size} bytes, the limit is {limit}; send several requests"
    return ApiError(message, status=413, code="body_too_large", headers=CLOSING)
