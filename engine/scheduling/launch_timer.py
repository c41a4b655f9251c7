"""Decides how long the launch of the next step may wait: until shortly before the running step is done.
Requests that arrive meanwhile join it instead of the step after it.

The lengths of steps are predicted by the device's own clock, so that a late host does not make them longer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from headway.engine.scheduling.plan import Plan, StepResult

# The next step is launched at once after a step that is shorter than this.
_LEAST_STEP_SECONDS = 5e-3
# A step is due this long before the running step is done, and earlier by this many times the recent launch
# time.
_SPARE_SECONDS, _SPARE_LAUNCHES = 1e-3, 2
# The factor by which a slow launch counts less with each launch after it.
_FORGETTING = 0.9
# The numbers of steps that are remembered of each kind, and of kinds.
_NUM_KNOWN, _NUM_KINDS = 16, 1024
# Steps belong to one kind if their numbers of rows, of prompt tokens and of cached keys before these fall
# into the same interval of these sizes.
_ROWS, _TOKENS, _KEYS = 16, 128, 2048
# A warning is logged for a step that takes this many times as long as the shortest of at least this many
# steps of its kind, and at least this many seconds, but only once in this time. Steps with guided rows are
# left out: the device waits in them for the host, which fills masks and, at first, captures graphs.
_SLOW_TIMES, _SLOW_KNOWN, _SLOW_SECONDS, _TOLD_SECONDS = 8, 8, 0.1, 60.0

logger = logging.getLogger(__name__)

Kind = tuple[bool, int, int, int, int]


class LaunchTimer:
    """Mutable: keeps the times of steps and launches, and when the next step is due. Times are in seconds.

    The shortest known step of a kind is the prediction, because a late launch leaves the device idle. Steps
    may be even shorter, since a kind leaves out facts such as the keys of the round's rows.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Kind, deque[float]] = {}
        self._launch_seconds = 0.0
        self._due: float | None = None
        self._told: float | None = None

    def learn_launch(self, since: float) -> None:
        """Learns the time of a launch: all work of the host for it since then, or since it was due."""
        seconds = self._clock() - (since if self._due is None else max(since, self._due))
        self._launch_seconds = max(seconds, _FORGETTING * self._launch_seconds)

    def learn_step(self, plan: Plan, result: StepResult) -> None:
        kind = _kind_of(plan)
        if kind not in self._known and len(self._known) >= _NUM_KINDS:
            self._known.clear()
        known = self._known.setdefault(kind, deque(maxlen=_NUM_KNOWN))
        seconds, now = result.seconds.total, self._clock()
        is_slow = (
            not plan.guided_rows
            and len(known) >= _SLOW_KNOWN
            and seconds > max(_SLOW_SECONDS, _SLOW_TIMES * min(known))
        )
        if is_slow and (self._told is None or now - self._told >= _TOLD_SECONDS):
            self._told = now
            logger.warning(
                "a step took %.2f s, %.0f times as long as the shortest of its kind; another process may hold its "
                "processors or its GPU",
                seconds,
                seconds / max(min(known), 1e-6),
            )
        known.append(seconds)

    def expect(self, plan: Plan | None, begin: float) -> None:
        """Notes when the plan began on the device. None: no step runs, or its start is unknown, so that the
        next step is due at once."""
        known = () if plan is None else self._known.get(_kind_of(plan), ())
        seconds = min(known, default=0.0)
        ahead = _SPARE_SECONDS + _SPARE_LAUNCHES * self._launch_seconds
        self._due = begin + seconds - ahead if seconds >= _LEAST_STEP_SECONDS else None

    def seconds_until_due(self) -> float:
        """Returns the time until the next step is due, 0 or less if it is."""
        return 0.0 if self._due is None else self._due - self._clock()


def _kind_of(plan: Plan) -> Kind:
    num_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
    start = max((chunk.start for chunk in plan.prefill), default=0)
    num_rows = len(plan.decode_request_ids)
    return (
        bool(plan.guided_rows),
        -(-num_rows // _ROWS),
        plan.depth,
        -(-num_tokens // _TOKENS),
        start // _KEYS,
    )
