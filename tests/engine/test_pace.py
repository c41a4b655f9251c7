"""How long the loop may wait before it plans the next step, and that it takes mail meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headway.engine import loop as loop_module
from headway.engine.batch import Plan, PrefillChunk, StepResult
from headway.engine.loop import EngineLoop
from headway.engine.mailbox import Abort, FromEngine, ToEngine
from headway.engine.pace import Pace

KIND = (3, 8)


def paced(*durations: float, launch: float = 0.0) -> tuple[Pace, float]:
    """(after steps of these durations, one behind the other and each awaited, the time at which the last ended)."""
    pace, now = Pace(), 100.0
    pace.ended(KIND, now, was_awaited=True, is_followed=True)
    for duration in durations:
        pace.launched(launch)
        now += duration
        pace.ended(KIND, now, was_awaited=True, is_followed=True)
    return pace, now


def test_steps_are_taken_to_be_as_short_as_the_shortest_of_late() -> None:
    pace, now = paced(0.020, 0.016, 0.017)
    assert pace.seconds_left(KIND, now) == pytest.approx(0.016 * 1.02 - 0.003)
    assert pace.seconds_left(KIND, now + 0.010) == pytest.approx(0.016 * 1.02 - 0.013)
    assert pace.seconds_left(KIND, now + 0.015) == 0.0
    pace, now = paced(0.016, *[0.030] * 40)
    assert pace.seconds_left(KIND, now) == pytest.approx(0.027, abs=1e-3), (
        "what was once short may be long now"
    )


def test_a_slow_host_starts_earlier() -> None:
    pace, now = paced(0.030, 0.030, launch=0.010)
    assert pace.seconds_left(KIND, now) == pytest.approx(0.030 - 0.015)


def test_nobody_waits_for_short_steps_or_unknown_ones() -> None:
    pace, now = paced(0.009)
    assert pace.seconds_left(KIND, now) == 0.0
    pace, now = paced(0.020)
    assert pace.seconds_left((3, 7), now) == 0.0
    assert pace.seconds_left(None, now) == 0.0
    pace.ended(KIND, now, was_awaited=True, is_followed=False)
    assert pace.seconds_left(KIND, now) == 0.0, "nothing runs"
    pace, now = paced(0.020)
    pace.ended(KIND, now + 0.020, was_awaited=False, is_followed=True)
    assert pace.seconds_left(KIND, now + 0.020) == 0.0, "when the step that runs began is not known"
    pace.ended(KIND, now + 0.021, was_awaited=True, is_followed=True)
    assert pace.seconds_left(KIND, now + 0.021) == 0.0, "the device waited: nothing is known of the kind"
    pace.ended(KIND, now + 0.041, was_awaited=True, is_followed=True)
    assert pace.seconds_left(KIND, now + 0.041) == pytest.approx(0.017)


class Clock:
    """A device whose steps take these durations, then 20 ms each, and mail that comes at given times; both move the time on."""

    def __init__(self, arrivals: Sequence[float], durations: Sequence[float] = ()) -> None:
        self.now = self.busy_until = 0.0
        self.arrivals = deque(arrivals)
        self.durations = deque(durations)
        self.idle_before: list[float] = []

    def launch(self, plan: Plan) -> _Handle:
        self.idle_before.append(max(0.0, self.now - self.busy_until))
        duration = self.durations.popleft() if self.durations else 0.020
        self.busy_until = max(self.now, self.busy_until) + duration
        return _Handle(self, self.busy_until)

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        until = self.now + timeout_seconds
        if self.arrivals and self.arrivals[0] <= until:
            self.now = max(self.now, self.arrivals.popleft())
            return [Abort(0)]
        self.now = until
        return []

    def send(self, message: FromEngine) -> None: ...


class _Handle:
    def __init__(self, clock: Clock, done_at: float) -> None:
        self._clock = clock
        self._done_at = done_at

    def is_ready(self) -> bool:
        return self._clock.now >= self._done_at

    def first(self) -> None: ...

    def result(self) -> StepResult:
        self._clock.now = max(self._clock.now, self._done_at)
        return StepResult()


class Plans:
    """A scheduler that always has a round of 128 rows; notes when it planned, and when it heard of mail."""

    has_work = True

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.planned: list[float] = []
        self.heard: list[float] = []

    def plan(self) -> Plan:
        self.planned.append(self._clock.now)
        return Plan(len(self.planned), 3, decode_request_ids=(1,) * 128)

    def abort(self, request_id: int, reason: object) -> None:
        self.heard.append(self._clock.now)

    def update(self, plan: Plan, result: StepResult) -> list[object]:
        return []

    def drain_faults(self) -> list[object]:
        return []

    def snapshot(self) -> None: ...


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Parametrized: what `Clock` takes."""
    clock = Clock(*request.param)
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(EngineLoop, "_send_stats", lambda self: None)
    return clock


@pytest.mark.parametrize("clock", [[[0.102, 0.104, 0.119, 0.130]]], indirect=True, ids=["20-ms"])
def test_mail_that_comes_while_a_step_runs_is_in_the_next_plan(clock: Clock) -> None:
    plans = Plans(clock)
    loop = EngineLoop(plans, clock, clock)  # type: ignore[arg-type]
    while len(plans.planned) < 9:
        loop.step()
    assert plans.heard == pytest.approx([0.102, 0.104, 0.120, 0.130]), "at once, but for 3 ms a step"
    late = [round(1000 * t % 20, 3) for t in plans.planned[4:]]
    assert late == [17.0] * 5, "3 ms before the step that runs is over"
    assert clock.busy_until == pytest.approx(9 * 0.020), "and the device is never idle"


@pytest.mark.parametrize(
    "clock", [[[], [0.015] * 20 + [0.040] * 100 + [0.015] * 60]], indirect=True, ids=["40-ms"]
)
def test_steps_that_get_shorter_are_noticed(clock: Clock) -> None:
    """After long steps the first short one ends before the next was planned. Then it is known."""
    loop = EngineLoop(Plans(clock), clock, clock)  # type: ignore[arg-type]
    while len(clock.idle_before) < 170:
        loop.step()
    late = clock.idle_before[1:]
    assert sum(late[:119]) == 0.0
    assert 0.0 < sum(late) < 0.025
    assert sum(late[125:]) == 0.0


@pytest.mark.parametrize("clock", [[[]]], indirect=True, ids=["20-ms"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_first_tokens_that_come_before_their_round_do_not_wait(clock: Clock, *, is_mixed: bool) -> None:
    plans = Plans(clock)
    plan, chunk = plans.plan, PrefillChunk(7, 7, 0, (1,), None, is_last=True)
    plans.plan = lambda: replace(plan(), prefill=(chunk,), is_mixed=is_mixed)  # type: ignore[method-assign]
    loop = EngineLoop(plans, clock, clock)  # type: ignore[arg-type]
    while len(plans.planned) < 9:
        loop.step()
    assert [round(1000 * t % 20, 3) for t in plans.planned[4:]] == [17.0 if is_mixed else 0.0] * 5
