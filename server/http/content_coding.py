"""Decodes compressed bodies while they arrive: gzip and deflate (RFC 9110, 8.4.1)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from headway.server.base.errors import ApiError

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's codes of the two formats
# zlib copies the bytes after a member, so that many small members in a large part would cost the square of
# its size.
_SLICE_BYTES = 1024
ACCEPTED = {"Accept-Encoding": "gzip, deflate, identity"}


class Decoder:
    """Decodes one body. Mutable: the reader of the body is its only writer."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._inflater = zlib.decompressobj(_WINDOW_BITS[coding])

    def decode(self, part: bytes, max_bytes: int) -> bytes:
        """Returns the next decoded bytes, at most max_bytes (1 or more). Raises ApiError for invalid data.

        A result of max_bytes may leave some of the part unread; the caller then refuses the body.
        """
        decoded = bytearray()
        try:
            for start in range(0, len(part), _SLICE_BYTES):
                self._inflate(part[start : start + _SLICE_BYTES], decoded, max_bytes)
        except zlib.error as error:
            raise _bad_body(self._coding, f"is corrupt ({error})") from None
        return bytes(decoded)

    def finish(self) -> None:
        """Raises ApiError if the body has ended too early."""
        if not self._inflater.eof:
            raise _bad_body(self._coding, "is cut off")

    def _inflate(self, data: bytes, decoded: bytearray, max_bytes: int) -> None:
        while data and len(decoded) < max_bytes:
            if self._inflater.eof:  # gzip may have further members, and zeros as padding
                if self._coding == "deflate":
                    raise zlib.error("data follows its end")
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._inflater = zlib.decompressobj(_WINDOW_BITS[self._coding])
            decoded += self._inflater.decompress(data, max_bytes - len(decoded))
            data = self._inflater.unused_data


def decoder_for(headers: Sequence[str]) -> Decoder | None:
    """headers: the values of Content-Encoding. Returns None for a body that is not encoded. Raises
    ApiError 415."""
    named = [coding.strip().lower() for value in headers for coding in value.split(",")]
    codings = [coding for coding in named if coding not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _WINDOW_BITS:
        raise ApiError(
            f"Content-Encoding is {', '.join(codings)!r}; send the body as it is, or with one of gzip and deflate",
            status=415,
            code="unsupported_content_encoding",
            headers=ACCEPTED,
        )
    return Decoder(codings[0])


def _bad_body(coding: str, fault: str) -> ApiError:
    message = f"the body {fault}: Content-Encoding says {coding}; send all of the compressed bytes, or leave the header out"
    return ApiError(message, code="invalid_content_encoding")
