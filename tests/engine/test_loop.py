"""The loop's own rules: what a pause holds back, and what it does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from headway_testing.checkpoints import constructed_mimo, walk
from headway_testing.local import LateRunner, LocalEngine

from headway.engine import loop
from headway.engine.loop import EngineLoop, Handle, Launcher
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import Abort, FromEngine, Pause, Resume, RoundOutput, SetDepth
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan, StepResult


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads_late: bool) -> LocalEngine:
    monkeypatch.setattr(loop, "IDLE_SECONDS", 0.0)
    constructed_mimo(tmp_path)
    config = EngineConfig(model_path=str(tmp_path), dtype="float32", depth=2, max_running=2)
    return LocalEngine(config, reads_late=reads_late)


def expected(start: int, count: int) -> list[int]:
    return walk(start, count + 1)[1:]


@pytest.mark.parametrize("reads_late", [False, True], ids=["read-at-once", "one-step-in-flight"])
def test_a_depth_holds_for_requests_that_run_and_changes_no_text(engine: LocalEngine) -> None:
    request_id = engine.submit([3], max_tokens=60)

    def drafted_in(steps: int) -> int:
        before = sum(engine.engine.scheduler.snapshot().draft_tokens_per_position)
        for _ in range(steps):
            engine.step()
        return sum(engine.engine.scheduler.snapshot().draft_tokens_per_position) - before

    assert drafted_in(5) > 0
    engine.post.inbox.append(SetDepth(0))
    drafted_in(2)  # launched before
    assert drafted_in(10) == 0
    engine.post.inbox.append(SetDepth(2))
    assert drafted_in(5) > 0
    engine.run()
    assert engine.outputs[request_id].token_ids == expected(3, 60)


@pytest.mark.parametrize("reads_late", [False, True], ids=["read-at-once", "one-step-in-flight"])
class TestPause:
    def test_no_step_is_launched_and_all_go_on_where_they_were(self, engine: LocalEngine) -> None:
        ids = [engine.submit([start], max_tokens=30) for start in (3, 5, 7)]  # the third has no row
        for _ in range(3):
            engine.step()
        engine.post.inbox.append(Pause())
        engine.step()  # reads what was in flight
        held = {i: list(engine.outputs[i].token_ids) for i in ids}
        late = engine.submit([9], max_tokens=4)
        steps = engine.engine.scheduler.snapshot().num_steps
        for _ in range(5):
            engine.step()
        assert {i: engine.outputs[i].token_ids for i in ids} == held
        assert 0 < len(held[0]) < 30
        stats = engine.engine.scheduler.snapshot()
        assert (stats.num_steps, stats.num_requests_running, stats.num_requests_waiting) == (steps, 2, 2)
        engine.post.inbox.append(Resume())
        engine.run()
        starts = dict(zip([*ids, late], (3, 5, 7, 9), strict=True))
        for request_id, start in starts.items():
            output = engine.outputs[request_id]
            assert output.token_ids == expected(start, len(output.token_ids))
            assert output.finish_reason is FinishReason.LENGTH

    def test_an_abort_frees_its_blocks_meanwhile(self, engine: LocalEngine) -> None:
        ids = [engine.submit([start], max_tokens=30) for start in (3, 5, 7)]
        engine.step()
        engine.post.inbox += [Pause(), *(Abort(i) for i in ids)]
        engine.step()
        stats = engine.engine.scheduler.snapshot()
        assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)

    def test_a_paused_loop_waits_for_mail_instead_of_turning(
        self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loop, "IDLE_SECONDS", 0.5)
        timeouts: list[float] = []
        receive = engine.post.receive

        def recorded(timeout_seconds: float = 0.0) -> object:
            timeouts.append(timeout_seconds)
            return receive(timeout_seconds)

        monkeypatch.setattr(engine.post, "receive", recorded)
        engine.submit([3], max_tokens=30)
        engine.step()
        engine.post.inbox.append(Pause())
        for _ in range(4):
            engine.step()
        assert timeouts[-2:] == [0.5, 0.5]


@pytest.mark.parametrize("reads_late", [False], ids=["read-at-once"])
def test_the_priority_of_a_frame_is_that_of_the_request(engine: LocalEngine) -> None:
    for start in (3, 5):
        engine.submit([start], max_tokens=30)
    engine.step()
    waiting = [engine.submit([7], max_tokens=3, priority=priority) for priority in (0, -1)]
    engine.step()
    assert [r.request_id for r in engine.engine.scheduler.state.waiting] == waiting[::-1]


@pytest.mark.parametrize("reads_late", [False, True], ids=["read-at-once", "one-step-in-flight"])
def test_an_abort_that_fails_leaves_all_running(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [engine.submit([start], max_tokens=30) for start in (3, 5)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.scheduler, "abort", lambda *_: 1 / 0)
        engine.post.inbox.append(Abort(ids[0]))
        engine.step()
    outputs = engine.run()
    assert [outputs[i].token_ids for i in ids] == [expected(start, 30) for start in (3, 5)]


@pytest.mark.parametrize("reads_late", [False], ids=["read-at-once"])
def test_a_refusal_names_the_field(engine: LocalEngine) -> None:
    engine.submit([], max_tokens=3)
    engine.step()
    (event,) = engine.outputs[0].events
    assert (event.error_code, event.error_param) == ("invalid_value", "prompt")


@pytest.mark.parametrize("reads_late", [True], ids=["one-step-in-flight"])
@pytest.mark.parametrize("max_tokens", [1, 2, 30])
def test_a_first_token_has_an_event_of_its_own(engine: LocalEngine, max_tokens: int) -> None:
    ids = [engine.submit([start], max_tokens=max_tokens) for start in (3, 5, 7)]
    outputs = engine.run()
    for request_id, start in zip(ids, (3, 5, 7), strict=True):
        output = outputs[request_id]
        assert output.events[0].token_ids == expected(start, 1)
        assert output.token_ids == expected(start, max_tokens)
        assert output.finish_reason is FinishReason.LENGTH
    assert engine.engine.scheduler.snapshot().num_kv_blocks_used == 0


@pytest.mark.parametrize("reads_late", [True], ids=["one-step-in-flight"])
def test_a_first_token_may_end_a_request_whose_round_runs(engine: LocalEngine) -> None:
    stopped = engine.submit([3], max_tokens=30, stop_token_ids=expected(3, 1))
    other = engine.submit([5], max_tokens=30)
    outputs = engine.run()
    assert outputs[stopped].token_ids == expected(3, 1)
    assert outputs[stopped].finish_reason is FinishReason.STOP
    assert len(outputs[stopped].events) == 1
    assert outputs[other].token_ids == expected(5, 30)
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_kv_blocks_used == 0
    assert stats.num_generation_tokens == 31, "the tokens of its round are not counted"


@dataclass
class NotedHandle:
    """A launched step that notes when its result is read."""

    handle: Handle
    kind: str
    notes: list[str]

    def is_ready(self) -> bool:
        return self.handle.is_ready()

    def wait(self) -> None:
        self.handle.wait()

    def result(self) -> StepResult:
        self.notes.append(f"read {self.kind}")
        return self.handle.result()


@dataclass
class NotingRunner:
    """A runner that notes which steps are launched and read, and in which order."""

    runner: Launcher
    notes: list[str]

    def launch(self, plan: Plan) -> NotedHandle:
        kind = "round" if plan.decode_request_ids else "prompts"
        self.notes.append(f"launch {kind}")
        return NotedHandle(self.runner.launch(plan), kind, self.notes)


@pytest.mark.parametrize("reads_late", [True], ids=["one-step-in-flight"])
def test_first_tokens_are_sent_before_the_following_round_is_read(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    runner = LateRunner(NotingRunner(engine.engine.runner, notes))
    engine.loop = EngineLoop(engine.engine.scheduler, runner, engine.post)
    send = engine.post.send

    def noted(message: FromEngine) -> None:
        if isinstance(message, RoundOutput):
            notes.append(f"send {[len(event.token_ids) for event in message.events]}")
        send(message)

    monkeypatch.setattr(engine.post, "send", noted)
    for start in (3, 5):
        engine.submit([start], max_tokens=4)
    engine.run()
    assert notes[:4] == ["launch prompts", "launch round", "read prompts", "send [1, 1]"]
    assert notes[4:7] == ["launch round", "read round", "send [3, 3]"]
