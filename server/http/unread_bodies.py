"""Limits the bytes of incomplete bodies over all connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headway.server.base.errors import RETRY_AFTER, ApiError

MAX_UNREAD_BYTES = 64 * 2**20
UNCOUNTED_BYTES = (
    64 * 2**10
)  # bytes of each body that do not count, so that large requests do not block small ones
STALLED_SECONDS = 1.0


class UnreadBody:
    """One body that is being received. Mutable: its reader is its only writer."""

    def __init__(self, bodies: UnreadBodies, timeout: asyncio.Timeout) -> None:
        self._bodies = bodies
        self.timeout = timeout
        self.num_bytes = 0
        self.last_seconds = time.monotonic()

    def grow(self, num_bytes: int) -> None:
        """num_bytes: the number received in all. Raises ApiError (503) if no room is left."""
        self.num_bytes = num_bytes
        self.last_seconds = time.monotonic()
        self._bodies.make_room(self)

    @property
    def num_counted(self) -> int:
        return max(0, self.num_bytes - UNCOUNTED_BYTES)


class UnreadBodies:
    """The bodies that are being received. Mutable: `open` is the only writer of the set."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max_bytes = max_bytes
        self._open: set[UnreadBody] = set()

    @contextmanager
    def open(self, timeout: asyncio.Timeout) -> Iterator[UnreadBody]:
        """timeout: the time limit of the reading, which expires at once if the client sends nothing while
        others need the room."""
        body = UnreadBody(self, timeout)
        self._open.add(body)
        try:
            yield body
        finally:
            self._open.discard(body)

    def make_room(self, body: UnreadBody) -> None:
        """Ends other bodies until there is room, first those whose clients have been silent for longest.
        Raises ApiError if that is not enough."""
        if not body.num_counted:
            return
        others = sorted((other for other in self._open if other is not body), key=lambda b: b.last_seconds)
        total = body.num_counted + sum(other.num_counted for other in others)
        for other in others:
            if total <= self._max_bytes or body.last_seconds - other.last_seconds < STALLED_SECONDS:
                break
            total -= other.num_counted
            self._open.discard(other)
            other.timeout.reschedule(asyncio.get_running_loop().time())
        if total > self._max_bytes and others:
            raise ApiError(
                f"{total} bytes of request bodies are being received, the limit is {self._max_bytes}; try again later",
                status=503,
                code="too_many_bytes",
                headers=RETRY_AFTER,
            )
