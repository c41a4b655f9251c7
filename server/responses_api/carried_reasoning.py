"""Encodes reasoning in a form that clients send back unchanged, so that no server needs to store it.

It is not encrypted: the item shows the same text, and a client may send any text as reasoning. Clients that
send back only what looks encrypted, such as the AI SDK, preserve a model's reasoning between the steps of a
conversation by this form.
"""

from __future__ import annotations

import base64
import binascii
import zlib

from headway.server.base.errors import ApiError

PREFIX = "headway-reasoning-1."
_CHECKSUM_BYTES = 4


def carried(text: str) -> str:
    content = text.encode()
    payload = zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big") + content
    return PREFIX + base64.urlsafe_b64encode(payload).decode()


def carried_text(value: str, where: str) -> str | None:
    """Returns the text; None for a value of another server. Raises ApiError for a value of this server
    that was changed."""
    if not value.startswith(PREFIX):
        return None
    try:
        payload = base64.b64decode(value.removeprefix(PREFIX), altchars=b"-_", validate=True)
        content = payload[_CHECKSUM_BYTES:]
        if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES, "big") != payload[:_CHECKSUM_BYTES]:
            raise ValueError("the checksum differs")
        return content.decode()
    except (binascii.Error, ValueError):
        message = f"{where} is not as this server has sent it; send the item unchanged, or leave it out"
        raise ApiError(message, param=where, code="invalid_encrypted_content") from None
