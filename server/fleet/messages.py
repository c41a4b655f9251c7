"""What an ingress and a replica send each other through Ray's handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Headers = list[tuple[bytes, bytes]]

# Of one connection, not of the message that goes over it (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """An HTTP request as the client sent it. target: path and query, percent-encoded. key: what the router
    finds an owner by; empty where any replica will do."""

    method: str
    target: str
    headers: Headers
    body: bytes
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The beginning of an answer. body: what of it came with the headers or right after them."""

    status: int
    headers: Headers
    body: bytes


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns the headers that a proxy passes on."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
