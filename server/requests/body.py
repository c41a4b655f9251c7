"""The body of a request, decoded and read up to a limit, whatever its content type."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from headway.server.base.errors import ApiError, ClientGoneError
from headway.server.http.content_coding import Decoder, decoder_for
from headway.server.http.unread_bodies import UnreadBody
from headway.server.requests.services import services_of

BODY_SECONDS = 60.0
CLOSING = {"Connection": "close"}  # the rest of the body is not wanted


async def read_body(request: Request) -> bytes:
    """Raises ApiError as soon as the limit is passed, or announced to be. It holds for the body as it is sent
    and as it is decoded."""
    services = services_of(request)
    limit = services.limits.max_body_bytes
    decoder = decoder_for(request.headers.getlist("content-encoding"))
    announced = request.headers.get("content-length", "")
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
