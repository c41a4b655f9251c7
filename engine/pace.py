"""When to plan the next step: late enough that requests which come meanwhile are in it, and before the device is idle.

A step is planned while the one before runs. Planned at its begin, a request that comes just then waits for two steps.
Knows durations only; steps of a kind are alike. So that the device seldom waits they are taken as short as the shortest
of late, and the host as slow as it has been of late; where it waited all the same, what was known of the kind is
forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable

# Shorter steps are over before a client has answered to what the one before gave it.
LEAST_STEP_SECONDS = 0.010
LEAST_LEAD_SECONDS, LEAD_FACTOR = 0.003, 1.5
# By so much a step what was seen is forgotten: the shortest grows, the slowest shrinks.
FORGETTING = 0.02


class Pace:
    """Mutable: the loop tells it what it does, and asks how long it may wait. Times in seconds, by one clock."""

    def __init__(self) -> None:
        self._shortest: dict[Hashable, float] = {}
        self._slowest_launch = 0.0
        self._began: float | None = None  # the step that runs; None: not known

    def launched(self, seconds: float) -> None:
        """The host took so long to plan and launch a step."""
        self._slowest_launch = max(seconds, self._slowest_launch * (1 - FORGETTING))

    def ended(self, kind: Hashable | None, now: float, *, was_awaited: bool, is_followed: bool) -> None:
        """A step is over. kind: None if its length says nothing of others. was_awaited: the host saw it happen.
        is_followed: the next one was launched already, and begins."""
        if self._began is not None and kind is not None:
            if was_awaited:
                seconds = now - self._began
                self._shortest[kind] = min(seconds, self._shortest.get(kind, seconds) * (1 + FORGETTING))
            else:
                self._shortest.pop(kind, None)
        self._began = now if was_awaited and is_followed else None

    def seconds_left(self, kind: Hashable | None, now: float) -> float:
        """Until the step behind the one that runs, which is of that kind, must be planned; 0: it is time, or nobody
        knows."""
        shortest = 0.0 if kind is None else self._shortest.get(kind, 0.0)
        if self._began is None or shortest < LEAST_STEP_SECONDS:
            return 0.0
        lead = max(LEAST_LEAD_SECONDS, LEAD_FACTOR * self._slowest_launch)
        return max(self._began + shortest - lead - now, 0.0)
