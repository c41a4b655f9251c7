"""The messages between an ingress and a replica, which Ray's handle carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headway.engine import HeadwayError

Headers = list[tuple[bytes, bytes]]
# The reasons why a request is sent to a replica: it owns the prefix; the owner has too many requests; the
# body has no prompt; or the routing has that name.
REASONS = ("prefix", "spilled", "no-prefix", "least-loaded", "round-robin")

# Headers of one connection, not of the message on it (RFC 9110, 7.6.1 and 10.1.1).
_HOP_BY_HOP = frozenset((
    b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
))  # fmt: skip


class ReplicaError(HeadwayError):
    """The server of a replica cannot start, or has ended."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """An HTTP request as the client sent it. target: path and query, percent-encoded. key: the routing key;
    empty if any replica will do. reason: the router's, one of REASONS.

    name, created_unix, told, num_sent: as in `Continuation`; told has one JSON text for each mark.
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
    """A part of an answer's body. told, num_sent: the events that it was made of in JSON, and the number
    of parts of the stream up to it; empty for an answer that cannot be continued elsewhere."""

    body: bytes
    told: tuple[bytes, ...] = ()
    num_sent: int = 0


@dataclass(frozen=True, slots=True)
class ResponseStart:
    """The beginning of an answer. first: the part of the body that arrived with the headers or right after
    them. is_journaled: another replica can continue the answer."""

    status: int
    headers: Headers
    first: Part
    is_journaled: bool = False


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Returns the headers that a proxy passes on."""
    return [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
