"""What /metrics says of a run is what the device's own results, recorded on the way, add up to."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LateRunner, LocalEngine
from prometheus_client.parser import text_string_to_metric_families

from headway.engine.loop import EngineLoop, Handle, Launcher
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.messages import Abort
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.scheduling.plan import Plan, StepResult
from headway.server.telemetry.metrics import Metrics

DEPTH = 3
STOP = 7


@dataclass
class Recorder:
    """Carries plans out and keeps them with what the device answered, in the order in which it was read.

    Aborts stand among them where the loop takes them in. The requests of `faulty` fail in their first round.
    """

    runner: Launcher
    faulty: set[int] = field(default_factory=set)
    log: list[tuple[Plan, StepResult] | Abort] = field(default_factory=list)

    def launch(self, plan: Plan) -> Handle:
        return RecordedHandle(self, plan, self.runner.launch(plan))


@dataclass
class RecordedHandle:
    recorder: Recorder
    plan: Plan
    handle: Handle

    def is_ready(self) -> bool:
        return self.handle.is_ready()

    def wait(self) -> None:
        self.handle.wait()

    def result(self) -> StepResult:
        failed = self.recorder.faulty.intersection(self.plan.decode_request_ids)
        self.recorder.faulty -= failed
        faults = tuple((request_id, "made up") for request_id in failed)
        result = replace(self.handle.result(), faults=faults)
        self.recorder.log.append((self.plan, result))
        return result


@dataclass
class Told:
    """One request, followed by hand."""

    num_prompt_tokens: int
    max_tokens: int
    depth_cap: int
    output: list[int] = field(default_factory=list)
    end: str | None = None

    def take(self, tokens: tuple[int, ...]) -> int:
        """Adds tokens up to the one that ends the request; returns how many."""
        for count, token in enumerate(tokens, start=1):
            self.output.append(token)
            if token == STOP or len(self.output) == self.max_tokens:
                self.end = "stop" if token == STOP else "length"
                return count
        return len(tokens)

    def num_valid_drafts(self, depth: int) -> int:
        """The last token of all needs no place in the cache, and the first of the window is no draft."""
        written = self.num_prompt_tokens + len(self.output) - 1
        limit = self.num_prompt_tokens + self.max_tokens - 1
        return min(depth, self.depth_cap, limit - written - 1)


def recount(log: list[tuple[Plan, StepResult] | Abort], requests: dict[int, Told]) -> Counter[str]:
    """The samples of /metrics, from the results alone."""
    found: Counter[str] = Counter()
    for entry in log:
        if isinstance(entry, Abort):
            if (told := requests.get(entry.request_id)) is not None:
                told.end = told.end or entry.reason.value
            continue
        plan, result = entry
        for request_id, _ in result.faults:
            requests[request_id].end = requests[request_id].end or "error"
        ids = [chunk.request_id for chunk in plan.prefill if chunk.is_last]
        for request_id, token in zip(ids, result.first_token_ids, strict=True):
            if requests[request_id].end is None:
                found["generation"] += requests[request_id].take((token,))
        found["rounds"] += len(plan.decode_request_ids) > 0
        found[f"rounds of {plan.depth}"] += len(plan.decode_request_ids) > 0
        for request_id, tokens in zip(plan.decode_request_ids, result.emitted, strict=True):
            if request_id is None or requests[request_id].end is not None:
                continue
            told = requests[request_id]
            drafted = told.num_valid_drafts(plan.depth)
            kept = told.take(tokens)
            accepted = min(len(tokens) - 1, kept)
            found += Counter({"generation": kept, "draft": drafted, "accepted": accepted, "row rounds": 1})
            found["drafts"] += drafted > 0
            for position in range(1, drafted + 1):
                found[f"draft {position}"] += 1
                found[f"accepted {position}"] += position <= accepted
            found["emitted"] += kept
            found[f"emitted {kept}"] += 1
    return found


def admitted(log: list[tuple[Plan, StepResult] | Abort]) -> set[int]:
    """Those that ever took a row; others were aborted while they waited."""
    return {setup.request_id for entry in log if isinstance(entry, tuple) for setup in entry[0].setups}


def samples(engine: LocalEngine) -> dict[str, float]:
    """Every sample of the text that Prometheus would scrape, by name and labels."""
    stats = engine.engine.scheduler.snapshot()
    text = Metrics(lambda: stats, lambda: 0).text().decode()
    families = text_string_to_metric_families(text)
    return {
        s.name.removeprefix("headway_") + "".join(f" {v}" for v in s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    path = constructed_mimo(tmp_path / "model", noise=0.06, max_position_embeddings=256)
    return LocalEngine(
        EngineConfig(model_path=str(path), max_running=8, prefill_chunk=64, depth=DEPTH, prefix_caching=False)
    )


def until_idle(engine: LocalEngine) -> None:
    while engine.engine.scheduler.has_work:
        engine.step()


@pytest.mark.parametrize("reads_late", [False, True], ids=["reads-at-once", "reads-late"])
def test_metrics_are_what_the_recorded_results_add_up_to(engine: LocalEngine, reads_late: bool) -> None:
    runner = engine.engine.runner
    recorder = Recorder(LateRunner(runner) if reads_late else runner, faulty={7, 21, 33, 50, 70})
    engine.loop = EngineLoop(engine.engine.scheduler, recorder, engine.post)
    chance = random.Random(3)
    requests: dict[int, Told] = {}
    for number in range(80):
        if number % 20 == 0:
            until_idle(engine)
            engine.engine.scheduler.set_depth((3, 1, 0, 2)[number // 20])
        cap, prompt = (
            chance.choice([0, 1, 3, 3]),
            [chance.randrange(128) for _ in range(chance.randint(1, 90))],
        )
        told = Told(len(prompt), chance.randint(1, 60), cap)
        request_id = engine.submit(
            prompt,
            max_tokens=told.max_tokens,
            sampling=SamplingParams(temperature=chance.choice([0.0, 0.7]), seed=chance.getrandbits(64)),
            stop_token_ids=[STOP],
            max_draft_tokens=cap,
        )
        requests[request_id] = told
        if request_id % 6 == 5:  # one of the last six: it waits, is prefilled, generates or has ended
            reason = chance.choice([FinishReason.ABORT, FinishReason.STOP])
            abort = Abort(request_id - chance.randrange(6), reason)
            recorder.log.append(abort)
            engine.post.inbox.append(abort)
        engine.step()
    until_idle(engine)
    for request_id in range(1000, 1005):  # unknown ids: an abort that comes too late counts nowhere
        engine.post.inbox.append(Abort(request_id))
    engine.step()
    found = recount(recorder.log, requests)
    seen = samples(engine)

    assert found["accepted"] > 300
    assert (
        seen["generation_tokens_total"]
        == found["generation"]
        == sum(len(t.output) for t in requests.values())
    )
    assert seen["prompt_tokens_total"] == sum(requests[i].num_prompt_tokens for i in admitted(recorder.log))
    assert seen["spec_decode_num_drafts_total"] == found["drafts"]
    assert seen["spec_decode_num_draft_tokens_total"] == found["draft"]
    assert seen["spec_decode_num_accepted_tokens_total"] == found["accepted"]
    for position in (1, 2, 3):
        for kind in ("draft", "accepted"):
            name = f"spec_decode_num_{kind}_tokens_per_pos_total {position}"
            assert seen[name] == found[f"{kind} {position}"], name
    assert seen["tokens_per_round_count"] == found["row rounds"]
    assert seen["tokens_per_round_sum"] == found["emitted"]
    for count in range(1, DEPTH + 2):
        up_to = sum(found[f"emitted {i}"] for i in range(1, count + 1))
        assert seen[f"tokens_per_round_bucket {count}.0"] == up_to
    assert seen["spec_decode_depth_count"] == found["rounds"]
    assert seen["spec_decode_depth_sum"] == sum(
        depth * found[f"rounds of {depth}"] for depth in range(DEPTH + 1)
    )
    ends = Counter(told.end for told in requests.values())
    assert (ends["stop"] > 5, ends["abort"] > 1, ends["error"] > 0, None in ends) == (True, True, True, False)
    for reason in ("stop", "length", "abort", "error"):
        assert seen[f"requests_finished_total {reason}"] == ends[reason]
    assert seen["kv_cache_blocks used"] == 0
    # The acceptance length as dashboards compute it.
    assert seen["tokens_per_round_sum"] / seen["tokens_per_round_count"] > 1.3
