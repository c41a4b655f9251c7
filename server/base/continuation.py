"""What makes an answer of one server go on in another: everything that it has drawn or been told from
outside.

An answer is a function of its request, of what the server draws for it (seeds, ids, the time) and of what the
engine gives. A fleet's ingress brings the first two to each server, and to the second one also what the
engine of the first had given.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom

import msgspec
from starlette.requests import Request

from headway.engine import TokenEvent

# In the headers of an answer whose parts end in marks, see `Journal`.
JOURNAL = "x-headway-journal"
MARK = b": headway "


@dataclass(frozen=True, slots=True)
class Continuation:
    """name: all draws follow from it; None: they are random. told: what the engine has given so far, as far
    as the client has been told of it; request_id is the number of the choice. num_sent: parts of the stream
    that the client has. keeps_journal: the stream tells what it is made of."""

    name: str | None = None
    created_unix: int = field(default_factory=lambda: int(time.time()))
    told: Sequence[TokenEvent] = ()
    num_sent: int = 0
    keeps_journal: bool = False

    def draws(self, purpose: str) -> Random:
        """Returns where all that serves one purpose is drawn from."""
        return SystemRandom() if self.name is None else Random(f"{self.name} {purpose}")


class Journal:
    """What a stream is made of, told in it after each part as a comment of server-sent events.

    A mark has the number of parts so far and the engine's events that they were made of since the last mark.
    Mutable: its stream's generation adds events, and its response takes them.
    """

    def __init__(self, num_sent: int) -> None:
        """num_sent: parts that the client has already; they are left out."""
        self.num_sent = num_sent
        self._events: list[TokenEvent] = []

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)

    def mark(self, num_parts: int) -> bytes:
        """Returns the mark after that many parts; it takes the events out."""
        events, self._events = self._events, []
        return MARK + b"%d " % num_parts + msgspec.json.encode(events) + b"\n\n"


def continuation_of(request: Request) -> Continuation:
    found = request.scope["state"].get("continuation")
    return found if isinstance(found, Continuation) else Continuation()
