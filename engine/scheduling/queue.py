"""Decides which request is admitted next. HTTP requests take turns, whatever number of choices each of them
has.

A group holds the choices of one HTTP request. Within a priority the n-th choice of a group comes after the (n
- 1)-th of every other group that waits:

    running   a a a b       a4 waits as the 4th of its group, b2 as the 2nd, c1 as the 1st: c1, b2, a4

Knows neither blocks nor tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.engine.protocol.errors import QueueFullError
from headway.engine.scheduling.request import Request

# The waiting choices are limited to this number for each group that may wait. Groups with many choices are
# refused first.
CHOICES_PER_GROUP = 8


class Turn(NamedTuple):
    """The precedence of a request: a lower one is admitted and computed first, and preempted last.

    rank: 1 for the first of its group that runs, 2 for the second.
    """

    priority: int
    rank: int
    arrival: int


@dataclass(slots=True)
class _Group:
    """Mutable: written by the queue alone. Both lists are in order of precedence."""

    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    @property
    def next_turn(self) -> Turn:
        """Returns the turn of the group's first waiting request."""
        head = self.waiting[0]
        return Turn(head.priority, len(self.running) + 1, head.arrival)


class Queue:
    """The waiting requests, and the running ones of each group. Mutable: the scheduler is its only writer."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._groups: dict[int, _Group] = {}
        self._heads: list[tuple[Turn, int]] = []  # of each group that waits: its next turn and its id
        self._num_waiting = 0
        self._num_running = 0
        self._num_running_groups = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests in order of precedence."""
        waiting = (request for group in self._groups.values() for request in group.waiting)
        return iter(sorted(waiting, key=lambda request: request.precedence))

    @property
    def num_extra(self) -> int:
        """Returns the number of running requests beyond the first of each group."""
        return self._num_running - self._num_running_groups

    def check_room(self, request: Request) -> None:
        """Raises QueueFullError if there is no room for the request.

        A group that has few choices is not refused because of others that have many.
        """
        num_groups, most = len(self._heads), CHOICES_PER_GROUP * self._max_groups
        group = self._groups.get(request.group)
        num_own = len(group.waiting) if group is not None else 0
        if num_own == 0 and num_groups >= self._max_groups:
            raise QueueFullError(
                f"{num_groups:,} requests wait, the limit is {self._max_groups:,} (max_waiting); try again later",
                code="queue_full",
            )
        if self._num_waiting >= most and num_own >= most // max(num_groups, 1):
            raise QueueFullError(
                f"{self._num_waiting:,} choices wait, {num_own:,} of them of this request, the limit is {most:,} "
                f"({CHOICES_PER_GROUP} x max_waiting), shared by {num_groups:,} requests; ask for fewer choices, or try "
                "again later",
                code="queue_full",
            )

    def append(self, request: Request) -> None:
        """Adds a request that waits."""
        group = self._groups.setdefault(request.group, _Group())
        self._hide(request.group)
        _insert(group.waiting, request)
        self._num_waiting += 1
        self._show(request.group)

    def remove(self, request: Request) -> None:
        """Removes a request that no longer waits."""
        self._hide(request.group)
        self._groups[request.group].waiting.remove(request)
        self._num_waiting -= 1
        self._show(request.group)

    def note_start(self, request: Request) -> None:
        """Adds a request that runs."""
        group = self._groups.setdefault(request.group, _Group())
        self._hide(request.group)
        _insert(group.running, request)
        self._num_running += 1
        self._num_running_groups += len(group.running) == 1
        self._show(request.group)

    def note_end(self, request: Request) -> None:
        """Removes a request that no longer runs."""
        group = self._groups[request.group]
        self._hide(request.group)
        group.running.remove(request)
        self._num_running -= 1
        self._num_running_groups -= not group.running
        self._show(request.group)

    def turn(self, request: Request) -> Turn:
        """Returns the turn of a running request, or of a waiting one as if it were the next of its group."""
        if self.num_extra == 0 and request.row is not None:
            return Turn(request.priority, 1, request.arrival)
        running = self._groups[request.group].running
        rank = (running.index(request) if request.row is not None else len(running)) + 1
        return Turn(request.priority, rank, request.arrival)

    def first(self, *, allows_extra: bool) -> Request | None:
        """Returns the next request to be admitted. allows_extra: its group may have a row already."""
        for turn, group in self._heads:
            if allows_extra or turn.rank == 1:
                return self._groups[group].waiting[0]
        return None

    def newcomers(self) -> Iterator[Request]:
        """Returns the first waiting request of each group without a row, in the order of their turns."""
        return (self._groups[group].waiting[0] for turn, group in self._heads if turn.rank == 1)

    def _hide(self, group_id: int) -> None:
        """Removes the group's entry from `_heads`, because it is about to change."""
        group = self._groups[group_id]
        if group.waiting:
            del self._heads[bisect.bisect_left(self._heads, (group.next_turn, group_id))]

    def _show(self, group_id: int) -> None:
        group = self._groups[group_id]
        if group.waiting:
            bisect.insort(self._heads, (group.next_turn, group_id))
        elif not group.running:
            del self._groups[group_id]


def _insert(requests: list[Request], request: Request) -> None:
    bisect.insort(requests, request, key=lambda r: r.precedence)
