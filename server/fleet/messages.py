"""What an ingress and a replica send each other through Ray's handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.engine import HeadwayError

Headers = list[tuple[bytes, bytes]]
# Why a request is sent to a replica: it owns the beginning; the owner has too much to do; the body has no
# prompt; or as the routings of these names say.
REASONS = ("prefix", "spilled", "no-prefix", "least-loaded", "round-robin")

# Of one connection, not of the message that goes over it (RFC 9110, 7.6.1 and 10.1.1).
_HOP_BY_HOP = frozenset((
    b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip


class ReplicaError(HeadwayError):
    """The server of a replica cannot be started, or has ended."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """An HTTP request as the client sent it. target: path and query, percent-encoded. key: what the router
    finds an owner by; empty where any replica will do. reason: the router's, one of REASONS.

    name, created_unix, told, num_sent: as `Continuation` has them; told by marks, as JSON.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    key: bytes
    name: str
    created_unix: int
    told: tuple[bytes, ...] = ()
    num_sent: int = 0
    reason: str = "no-prefix"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer's body. told, num_sent: what it was made of in JSON, and how many parts of a stream
    there were with it; nothing of an answer that cannot go on elsewhere."""

    body: bytes
    told: tuple[bytes, ...] = ()
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The beginning of an answer. first: the part of it that came with the headers or right after them.
    is_journaled: what breaks off can go on elsewhere."""

    status: int
    headers: Headers
    first: Part
    is_journaled: bool = False


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns the headers that a proxy passes on."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
