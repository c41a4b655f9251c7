"""The raw body of a request, read up to a limit, whatever its content type."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from headway.server.errors import ApiError, ClientGoneError

MAX_BODY_BYTES = 8 * 2**20


async def read_body(request: Request) -> bytes:
    """Raises ApiError as soon as the limit is passed, or announced to be."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large(announced)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise _too_large(f"over {MAX_BODY_BYTES}")
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _too_large(size: str) -> ApiError:
    message = f"the body has {size} bytes, the limit is {MAX_BODY_BYTES}; send several requests"
    return ApiError(message, status=413, code="body_too_large")
