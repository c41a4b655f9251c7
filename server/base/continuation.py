"""The state with which one server continues an answer that another has begun.

An answer is a function of its request, of what the server draws for it (seeds, ids, the time) and of what the
engine generates. A fleet's ingress sends the first two to each server, and to a server that continues an
answer also the events of the first server's engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom

import msgspec
from starlette.requests import Request

from headway.engine import TokenEvent

# This header marks an answer whose parts end in marks, see `Journal`.
JOURNAL = "x-headway-journal"
MARK = b": headway "


@dataclass(frozen=True, slots=True)
class Continuation:
    """name: the seed of all draws; None for random draws. told: the engine's events so far, as far as the
    client has seen their effect; request_id is the index of the choice. num_sent: the number of parts of
    the stream that the client has. keeps_journal: the stream carries the events that it is made of."""

    name: str | None = None
    created_unix: int = field(default_factory=lambda: int(time.time()))
    told: Sequence[TokenEvent] = ()
    num_sent: int = 0
    keeps_journal: bool = False

    def draws(self, purpose: str) -> Random:
        """Returns the generator of all draws for one purpose."""
        return SystemRandom() if self.name is None else Random(f"{self.name} {purpose}")


class Journal:
    """Writes the engine's events into the stream that is made of them, as a comment after each part.

    A mark has the number of parts so far and the engine's events since the last mark. Mutable: the stream's
    generation adds events, and its response takes them.
    """

    def __init__(self, num_sent: int) -> None:
        """num_sent: the number of parts that the client has already, which are left out."""
        self.num_sent = num_sent
        self._events: list[TokenEvent] = []

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)

    def mark(self, num_parts: int) -> bytes:
        """Returns the mark after that many parts, and forgets the events in it."""
        events, self._events = self._events, []
        return MARK + b"%d " % num_parts + msgspec.json.encode(events) + b"\n\n"


def continuation_of(request: Request) -> Continuation:
    found = request.scope["state"].get("continuation")
    return found if isinstance(found, Continuation) else Continuation()
