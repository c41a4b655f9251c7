"""A fault of our own in one request's host work ends that request, and nothing else notices.

An exception is raised at each call that the engine makes for a single request, in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from headway_testing.checkpoints import constructed_mimo, walk
from headway_testing.local import LocalEngine, Output

import headway.engine.execution.device_rows
import headway.engine.loop
import headway.engine.scheduling.admission
import headway.engine.scheduling.scheduler
from headway.engine import INTERNAL_ERROR
from headway.engine.execution.device_rows import DeviceRows
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.block_supply import BlockSupply
from headway.engine.scheduling.limits import Limits
from headway.engine.scheduling.plan import Plan, StepResult
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.result_reader import ResultReader
from headway.engine.scheduling.scheduler import Scheduler
from headway.engine.scheduling.updates import RequestUpdate
from headway.engine.state.processors import LogitsProcessorTable

VICTIM_SEED = 1
SHARED = 40  # tokens of each prompt that all prompts begin with


class Planted(Exception):
    """What the tests raise."""


@dataclass(frozen=True)
class Site:
    """A call: where it is looked up, and the number of the argument that tells whose it is."""

    owner: object
    name: str
    argument: int


def seed_of(value: object) -> int | None:
    """Whose request, sampling, set-up or message it is."""
    sampling = value if isinstance(value, SamplingParams) else getattr(value, "sampling", None)
    return sampling.seed if isinstance(sampling, SamplingParams) else None


SITES: dict[str, Site] = {
    "making the request": Site(headway.engine.loop, "_request", 0),
    "checking it": Site(Limits, "check", 1),
    "taking it in": Site(Scheduler, "add", 1),
    "its history": Site(headway.engine.scheduling.admission, "history_of", 0),
    "its prefix": Site(PrefixCache, "match", 1),
    "its blocks": Site(BlockSupply, "_num_needed", 1),
    "its growth": Site(BlockSupply, "_grow_row", 1),
    "its chunk": Site(headway.engine.scheduling.scheduler, "next_chunk", 0),
    "its row": Site(DeviceRows, "_prepare", 1),
    "its numbers": Site(headway.engine.execution.device_rows, "numbers_of", 0),
    "its tables": Site(LogitsProcessorTable, "set_up", 2),
    "reading its chunk": Site(ResultReader, "_read_chunk", 1),
    "reading its row": Site(ResultReader, "_read_row", 1),
    "publishing its blocks": Site(PrefixCache, "publish", 1),
    "its tokens": Site(RequestUpdate, "add", 1),
    "its event": Site(ResultReader, "_report", 1),
}


def plant(monkeypatch: pytest.MonkeyPatch, site: Site, nth_call: int) -> Callable[[], int]:
    """Raises at the victim's n-th call; returns what tells how many calls there were."""
    original = getattr(site.owner, site.name)
    calls = 0

    def faulty(*args: object, **kwargs: object) -> object:
        nonlocal calls
        if seed_of(args[site.argument]) == VICTIM_SEED:
            calls += 1
            if calls == nth_call:
                raise Planted("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(site.owner, site.name, faulty)
    return lambda: calls


def prompt_of(number: int) -> list[int]:
    return [*walk(3, SHARED + 5 * number), 100 + number]


def run(
    model_path: str, *, reads_late: bool, numbers: tuple[int, ...]
) -> tuple[LocalEngine, dict[int, Output]]:
    """A request that fills the prefix cache, then all others at once. Outputs by seed."""
    config = EngineConfig(model_path=model_path, dtype="float64", depth=3, prefill_chunk=32, max_running=3)
    engine = LocalEngine(config, reads_late=reads_late)
    ids = {9: engine.submit(prompt_of(9), max_tokens=4)}
    engine.run()
    for number in numbers:
        sampling = SamplingParams(temperature=0.5, seed=number, presence_penalty=0.5, num_logprobs=1)
        ids[number] = engine.submit(prompt_of(number), max_tokens=10 + 4 * number, sampling=sampling)
    engine.run()
    return engine, {seed: engine.outputs[request_id] for seed, request_id in ids.items()}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(constructed_mimo(tmp_path_factory.mktemp("model") / "mimo", noise=0.08))


@pytest.fixture(scope="module")
def healthy(model_path: str) -> dict[int, Output]:
    return run(model_path, reads_late=False, numbers=(0, 1, 2, 3, 4))[1]


# Read at once, a fault takes fewer of the ways out than read late.
@pytest.mark.parametrize(
    ("nth_call", "reads_late"),
    [pytest.param(1, False, marks=pytest.mark.long), (1, True), (2, True)],
    ids=["first call", "first call, read late", "second call, read late"],
)
@pytest.mark.parametrize("name", SITES)
def test_a_fault_ends_the_request_it_is_in_and_no_other(
    name: str,
    nth_call: int,
    reads_late: bool,
    model_path: str,
    healthy: dict[int, Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_calls = plant(monkeypatch, SITES[name], nth_call)
    engine, outputs = run(model_path, reads_late=reads_late, numbers=(0, 1, 2, 3, 4))
    is_hit = num_calls() >= nth_call
    assert is_hit or nth_call > 1, "the site is never reached"
    victim = outputs[VICTIM_SEED]
    for seed, wanted in healthy.items():
        if seed != VICTIM_SEED or not is_hit:
            assert (outputs[seed].token_ids, outputs[seed].finish_reason) == (
                wanted.token_ids,
                FinishReason.LENGTH,
            )
            assert outputs[seed].logprobs.ranks == wanted.logprobs.ranks
    if is_hit:
        assert victim.finish_reason is FinishReason.ERROR
        assert [event.finish_reason for event in victim.events].count(FinishReason.ERROR) == 1
        assert victim.events[-1].error_code == INTERNAL_ERROR
        assert "Planted: planted" in (victim.events[-1].error or "")
        assert victim.token_ids == healthy[VICTIM_SEED].token_ids[: len(victim.token_ids)]
    assert_nothing_leaks(engine, num_errors=int(is_hit))


def assert_nothing_leaks(engine: LocalEngine, *, num_errors: int) -> None:
    scheduler = engine.engine.scheduler
    stats = scheduler.snapshot()
    assert stats.finished_by_reason.get("error", 0) == num_errors
    assert stats.finished_by_reason["length"] == 6 - num_errors
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert not scheduler.has_work
    assert not scheduler.state.prefixes._chains
    # All rows can be taken once more, and what the device holds of the old ones harms nobody.
    again = [engine.submit(prompt_of(2), max_tokens=6) for _ in range(4)]
    engine.run()
    texts = [engine.outputs[i].token_ids for i in again]
    assert all(text == texts[0] and len(text) == 6 for text in texts)
    assert not engine.engine.runner.processors.is_used


def test_an_event_of_a_fault_comes_after_the_count_of_it(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, SITES["taking it in"], 1)
    engine = LocalEngine(EngineConfig(model_path=model_path, dtype="float64"))
    engine.post.inbox.append(
        Submit(request_id=5, prompt_token_ids=[1], sampling=SamplingParams(seed=VICTIM_SEED), max_tokens=1)
    )
    engine.loop.step()
    kinds = [type(message).__name__ for message in engine.post.sent]
    assert kinds.index("StatsSnapshot") < kinds.index("RoundOutput")


def test_a_request_can_be_aborted_while_its_fault_is_on_the_way(model_path: str) -> None:
    """The device reports a fault of a request that is gone by then, and the round that follows treats its row
    as padding."""
    engine = LocalEngine(EngineConfig(model_path=model_path, dtype="float64", prefix_caching=False))
    scheduler, runner = engine.engine.scheduler, engine.engine.runner
    request = Request(0, [1, 2, 3], SamplingParams(seed=1 << 80), max_tokens=5)
    request_ok = Request(1, [1, 2, 3], SamplingParams(), max_tokens=5)
    scheduler.state.requests[0] = request  # past the limits
    scheduler.state.waiting.append(request)
    scheduler.add(request_ok)
    steps: list[tuple[Plan, StepResult]] = []
    for _ in range(2):
        plan = scheduler.plan()
        assert plan is not None
        steps.append((plan, runner.launch(plan).result()))
    (_, prompts), (plan_of_round, round_) = steps
    assert [request_id for request_id, _ in prompts.faults] == [0]
    assert plan_of_round.decode_request_ids == (0, 1)
    assert [len(tokens) > 0 for tokens in round_.emitted] == [False, True]
    scheduler.abort(0)
    for plan, result in steps:
        assert [event.request_id for event in scheduler.update(plan, result)] == [1]
    assert scheduler.drain_faults() == []
