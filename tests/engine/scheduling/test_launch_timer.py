"""When steps are launched: late enough for who comes meanwhile, early enough that the device is never
idle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import GREEDY, LocalEngine

from headway.engine.loop import EngineLoop, Launcher
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import FromEngine, Shutdown, Submit, ToEngine
from headway.engine.protocol.stats import StageSeconds
from headway.engine.scheduling.launch_timer import LaunchTimer
from headway.engine.scheduling.plan import Plan, PrefillChunk, StepResult

STEP_SECONDS = 0.02
AHEAD_SECONDS = 0.002  # that a launch may come before the step in front is done


@dataclass
class Device:
    """Carries plans out one after the other, each in step_seconds by a clock of its own, with prompts in
    prefill_seconds more. Mutable.

    launch_seconds, unpack_seconds: of the host, for a launch and for a result that is there.
    """

    runner: Launcher
    step_seconds: float = STEP_SECONDS
    prefill_seconds: float = 0.0
    launch_seconds: float = 0.0
    unpack_seconds: float = 0.0
    now: float = 0.0
    free_at: float = 0.0
    idle_seconds: float = 0.0
    launches: list[tuple[float, float, Plan]] = field(default_factory=list)  # (when, when it begins, plan)

    def launch(self, plan: Plan) -> Running:
        self.now += self.launch_seconds
        begin = max(self.now, self.free_at)
        if self.launches:
            self.idle_seconds += begin - self.free_at
        seconds = self.step_seconds + (self.prefill_seconds if plan.prefill else 0.0)
        self.free_at = begin + seconds
        self.launches.append((self.now, begin, plan))
        result = replace(self.runner.launch(plan).result(), seconds=StageSeconds(target=seconds))
        return Running(self, self.free_at, result)

    def ahead_seconds(self) -> list[float]:
        """Of all launches but the first: how long before the step in front was done."""
        return [begin - when for when, begin, _ in self.launches[1:]]


@dataclass
class Running:
    device: Device
    end: float
    answer: StepResult

    def is_ready(self) -> bool:
        return self.device.now >= self.end

    def wait(self) -> None:
        self.device.now = max(self.device.now, self.end)

    def result(self) -> StepResult:
        self.wait()
        self.device.now += self.device.unpack_seconds
        return self.answer


@dataclass
class TimedPost:
    """Mail that comes at given times of the device's clock, which goes on while it is waited for."""

    device: Device
    mail: list[tuple[float, ToEngine]] = field(default_factory=list)

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        self.mail.sort(key=lambda item: item[0])
        if timeout_seconds > 0:
            until = self.device.now + timeout_seconds
            self.device.now = min([until, *(max(at, self.device.now) for at, _ in self.mail[:1])])
        come = [message for at, message in self.mail if at <= self.device.now]
        self.mail = [item for item in self.mail if item[0] > self.device.now]
        return come

    def send(self, message: FromEngine) -> None: ...


class Rig:
    """An engine on a device, which has the time."""

    def __init__(self, path: Path, step_seconds: float = STEP_SECONDS) -> None:
        config = EngineConfig(
            model_path=str(path),
            dtype="float32",
            depth=2,
            max_running=4,
            prefill_chunk=16,
            prefix_caching=False,
        )
        engine = LocalEngine(config).engine
        self.device = Device(engine.runner, step_seconds)
        self.post = TimedPost(self.device)
        self.loop = EngineLoop(engine.scheduler, self.device, self.post, clock=lambda: self.device.now)

    def submit(self, request_id: int, at: float, max_tokens: int = 250, length: int = 2) -> None:
        message = Submit(
            request_id=request_id, prompt_token_ids=[3] * length, sampling=GREEDY, max_tokens=max_tokens
        )
        self.post.mail.append((at, message))

    def steps(self, num: int) -> None:
        for _ in range(num):
            assert self.loop.step()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    constructed_mimo(tmp_path)
    return tmp_path


def test_who_comes_while_a_step_runs_is_in_the_next_one(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0)
    rig.steps(6)
    when, begin, _ = rig.device.launches[-1]
    rig.submit(1, at=begin + STEP_SECONDS / 2)
    rig.steps(3)
    _, begins, plan = [launch for launch in rig.device.launches if launch[2].prefill][-1]
    assert begins == pytest.approx(begin + STEP_SECONDS)
    assert [chunk.request_id for chunk in plan.prefill] == [1]
    assert when < begin


def test_the_device_is_never_idle_and_launches_are_late(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0)
    rig.steps(50)
    assert rig.device.idle_seconds == 0
    ahead = rig.device.ahead_seconds()[4:]
    assert 0 < min(ahead) <= max(ahead) <= AHEAD_SECONDS


def test_steps_of_another_kind_are_expected_to_take_what_these_take(path: Path) -> None:
    rig = Rig(path)
    rig.device.prefill_seconds = 2 * STEP_SECONDS
    rig.submit(0, at=0.0, max_tokens=200)
    rig.steps(6)
    for request_id in (1, 2):
        rig.submit(request_id, at=rig.device.now, max_tokens=1, length=30)
        rig.steps(6)
    ahead = rig.device.ahead_seconds()
    chunks = [place for place, (*_, plan) in enumerate(rig.device.launches[:-1]) if plan.prefill]
    first, last = chunks[-2:]
    assert last == first + 2, "a chunk of 16 tokens, a round, then the last chunk"
    assert 0 < min(ahead[first : last + 2]) <= max(ahead[first : last + 2]) <= AHEAD_SECONDS
    assert rig.device.idle_seconds == 0


def test_short_steps_are_followed_at_once(path: Path) -> None:
    rig = Rig(path, 0.004)
    rig.submit(0, at=0.0)
    rig.steps(20)
    assert rig.device.ahead_seconds()[1:] == pytest.approx([0.004] * 18)


def test_a_step_that_is_done_sooner_is_followed_within_a_look(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0)
    rig.steps(20)
    rig.device.step_seconds = 0.0085
    rig.steps(4)
    idle = rig.device.idle_seconds
    assert 0 < idle <= 0.002
    rig.steps(20)
    assert rig.device.idle_seconds == idle


def test_nobody_knows_when_a_step_began_that_was_launched_before_the_host_came_to_look(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0)
    rig.steps(20)
    rig.device.now = rig.device.free_at + STEP_SECONDS / 2
    rig.steps(2)
    (_, begin, _), (when, _, _) = rig.device.launches[-2:]
    assert when == begin, "at once"


def test_what_a_result_takes_the_host_is_no_part_of_the_step_behind_it(path: Path) -> None:
    rig = Rig(path)
    rig.device.unpack_seconds = 0.006
    rig.submit(0, at=0.0)
    rig.steps(40)
    assert rig.device.idle_seconds == 0
    assert max(rig.device.ahead_seconds()[4:]) <= AHEAD_SECONDS


def test_slow_launches_begin_earlier(path: Path) -> None:
    rig = Rig(path)
    rig.device.launch_seconds = 0.003
    rig.submit(0, at=0.0)
    rig.steps(4)
    rig.device.idle_seconds = 0.0
    rig.steps(36)
    assert rig.device.idle_seconds == 0
    assert 0.001 < min(rig.device.ahead_seconds()[6:]) <= max(rig.device.ahead_seconds()[6:]) < 0.006


def test_all_who_come_while_a_lone_step_runs_are_in_the_next_one(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0, max_tokens=1)
    rig.steps(3)  # which teaches what such a step takes
    start = rig.device.now + 1.0
    for request_id, at in ((1, start), (2, start + 0.006), (3, start + 0.012)):
        rig.submit(request_id, at=at, max_tokens=1)
    rig.device.now = start
    rig.steps(2)
    assert [[c.request_id for c in plan.prefill] for *_, plan in rig.device.launches[-2:]] == [[1], [2, 3]]


def test_a_shutdown_is_taken_while_a_launch_waits(path: Path) -> None:
    rig = Rig(path)
    rig.submit(0, at=0.0)
    rig.steps(6)
    num_launches = len(rig.device.launches)
    rig.post.mail.append((rig.device.now + STEP_SECONDS / 2, Shutdown()))
    assert not rig.loop.step()
    assert len(rig.device.launches) == num_launches


def plan_of(*chunks: tuple[int, int], rows: int = 0) -> Plan:
    """chunks: (start, length)."""
    prefill = tuple(
        PrefillChunk(0, 0, start, (1,) * length, hidden_block_id=None, is_last=True)
        for start, length in chunks
    )
    return Plan(step=0, depth=3, prefill=prefill, decode_request_ids=tuple(range(rows)))


def result_of(seconds: float) -> StepResult:
    quarter = seconds / 4
    return StepResult(
        seconds=StageSeconds(draft=quarter, target=quarter, bookkeeping=quarter, prefill=quarter)
    )


class TestLaunchTimer:
    def test_the_shortest_of_a_kind_counts_and_is_forgotten(self) -> None:
        timer = LaunchTimer(lambda: 7.0)
        plan = plan_of(rows=32)
        for seconds in (0.01, 0.02, 0.03):
            timer.learn_step(plan, result_of(seconds))
        timer.expect(plan, 7.0)
        assert timer.seconds_until_due() == pytest.approx(0.009)
        timer.expect(plan, 6.995)
        assert timer.seconds_until_due() == pytest.approx(0.004)
        for _ in range(14):
            timer.learn_step(plan, result_of(0.03))
        timer.expect(plan, 7.0)
        assert timer.seconds_until_due() == pytest.approx(0.019), "16 are known"
        for _ in range(2):
            timer.learn_step(plan, result_of(0.03))
        timer.expect(plan, 7.0)
        assert timer.seconds_until_due() == pytest.approx(0.029)

    @pytest.mark.parametrize(
        "other",
        [
            plan_of((0, 512), rows=48),
            plan_of((0, 384), rows=32),
            plan_of((2048, 512), rows=32),
            plan_of((512, 256), (2048, 256), rows=32),
            plan_of((512, 512), (512, 512), rows=32),
            replace(plan_of((0, 512), rows=32), depth=1),
        ],
        ids=["rows", "tokens", "keys", "keys-of-one", "prompts", "depth"],
    )
    def test_what_is_of_another_kind_is_not_known(self, other: Plan) -> None:
        timer = LaunchTimer(lambda: 0.0)
        plan = plan_of((512, 512), rows=32)
        timer.learn_step(plan, result_of(0.02))
        timer.expect(plan_of((1024, 300), (0, 200), rows=31), 0.0)
        assert timer.seconds_until_due() == pytest.approx(0.019)
        timer.expect(other, 0.0)
        assert timer.seconds_until_due() == 0

    def test_a_slow_launch_counts_less_with_each_that_follows(self) -> None:
        now = [0.0]
        timer = LaunchTimer(lambda: now[0])
        plan = plan_of(rows=32)
        timer.learn_step(plan, result_of(0.02))
        now[0] = 0.005
        timer.learn_launch(0.0)
        spare = []
        for _ in range(3):
            timer.expect(plan, now[0])
            spare.append(timer.seconds_until_due())
            timer.learn_launch(now[0])
        assert spare == pytest.approx([0.009, 0.019 - 0.009, 0.019 - 0.0081])

    def test_a_launch_takes_from_when_it_was_due(self) -> None:
        now = [0.0]
        timer = LaunchTimer(lambda: now[0])
        plan = plan_of(rows=32)
        timer.learn_step(plan, result_of(0.02))
        timer.expect(plan, 0.0)  # due at 0.019
        now[0] = 0.021
        timer.learn_launch(0.001)
        timer.expect(plan, now[0])
        assert timer.seconds_until_due() == pytest.approx(0.019 - 2 * 0.002)

    def test_it_knows_a_limited_number_of_kinds(self) -> None:
        timer = LaunchTimer(lambda: 0.0)
        for start in range(0, 2048 * 1024, 2048):
            timer.learn_step(plan_of((start, 8)), result_of(0.02))
        for _ in range(2):
            timer.learn_step(plan_of((0, 8)), result_of(0.02))
        assert len(timer._known) == 1024
        timer.learn_step(plan_of((0, 512)), result_of(0.02))
        assert len(timer._known) == 1


def test_a_step_of_many_times_its_usual_length_is_told_of_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    timer = LaunchTimer(lambda: now)
    plan = Plan(1, 3, decode_request_ids=(0,))
    for seconds in [0.02] * 8 + [0.15, 0.3, 0.3]:
        timer.learn_step(plan, StepResult(seconds=StageSeconds(target=seconds)))
    assert [record.getMessage()[:46] for record in caplog.records] == [
        "a step took 0.30 s, 15 times as long as the sh"
    ]
    now = 61.0
    timer.learn_step(plan, StepResult(seconds=StageSeconds(target=0.3)))
    assert len(caplog.records) == 2


def test_a_step_that_waits_for_its_masks_blames_no_other_process(caplog: pytest.LogCaptureFixture) -> None:
    """A grammar's first steps capture their graphs between the halves. They are known by themselves."""
    timer = LaunchTimer(lambda: 0.0)
    plain, guided = (Plan(1, 3, decode_request_ids=(0,), guided_rows=rows) for rows in ((), (0,)))
    for _ in range(8):
        timer.learn_step(plain, StepResult(seconds=StageSeconds(target=0.02)))
    for seconds in [0.5] + [0.03] * 8 + [0.5]:
        timer.learn_step(guided, StepResult(seconds=StageSeconds(target=seconds)))
    assert not caplog.records
    timer.expect(guided, 0.0)
    assert timer.seconds_until_due() == pytest.approx(0.029)
