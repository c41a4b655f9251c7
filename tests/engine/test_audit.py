"""Audits: finished requests are computed again without drafts and cached prefixes; faults are found, and
nothing else is told."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import cycle
from typing import Any

import msgspec
import pytest
import torch
from headway_testing.hybrid import HybridOracle
from headway_testing.local import LocalEngine

from headway.engine.build import assemble
from headway.engine.execution import prompt_ends
from headway.engine.execution import step as round_step
from headway.engine.grammar.compile import json_schema_source
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.messages import Abort
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.engine.protocol.stats import EngineStats
from headway.engine.scheduling import audit
from headway.engine.scheduling.prefix import PrefixCache
from headway.engine.scheduling.request import Request

DEMO = str(files("headway.engine.demo"))
DEMO_VOCABULARY, TINY_VOCABULARY = 4096, 151
TABLE = TokenTable([bytes([i]) if 32 <= i < 127 else b"" for i in range(DEMO_VOCABULARY)], [0, 1, 2, 3], [3])
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"enum": [1, 2, "three"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def config_of(path: str = DEMO, **fields: object) -> EngineConfig:
    fixed = {"model_path": path, "device": "cpu", "dtype": "float32", "max_running": 8, "max_model_len": 256,
             "kv_cache_memory_bytes": 1 << 23, "audit_rate": 1.0}  # fmt: skip
    return EngineConfig(**(fixed | fields))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(HybridOracle().save(tmp_path_factory.mktemp("model") / "model"))


def stats_of(engine: LocalEngine) -> EngineStats:
    return engine.engine.scheduler.snapshot()


def run_audits(engine: LocalEngine, max_steps: int = 100_000) -> dict[str, int]:
    """Steps until every request and every audit has ended. Returns the audits by outcome."""
    engine.run()
    for _ in range(max_steps):
        engine.step()
        if not engine.engine.scheduler.has_work and not engine.loop._auditor.num_open:
            return dict(stats_of(engine).audits_by_outcome)
    raise AssertionError(f"audits have not ended after {max_steps} steps")


def submit_some(engine: LocalEngine, count: int, *, vocabulary: int, seed: int = 0) -> list[int]:
    """Requests of all kinds: greedy and drawn, with and without logits processors and log-probabilities, some
    with common prefixes."""
    chance = random.Random(seed)
    common = [chance.randrange(vocabulary) for _ in range(80)]
    ids = []
    for number in range(count):
        prompt = [chance.randrange(vocabulary) for _ in range(chance.choice([1, 7, 33]))]
        if number % 3:
            prompt = common[: chance.choice([16, 48, 80])] + prompt
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 0.8]),
            seed=number,
            top_p=chance.choice([1.0, 0.9]),
            repetition_penalty=chance.choice([1.0, 1.0, 1.2]),
            num_logprobs=chance.choice([None, None, 2]),
            num_prompt_logprobs=chance.choice([None, None, None, 1]),
        )
        ids.append(engine.submit(prompt, max_tokens=chance.choice([1, 2, 9, 30]), sampling=sampling))
    return ids


def test_what_is_right_is_found_to_be_the_same() -> None:
    engine = LocalEngine(config_of())
    ids = submit_some(engine, 10, vocabulary=DEMO_VOCABULARY)
    assert run_audits(engine) == {"same": len(ids)}
    assert set(engine.outputs) == set(ids), "events of audits were sent"


def test_recurrent_layers_are_audited_as_well(hybrid: str) -> None:
    engine = LocalEngine(config_of(hybrid))
    submit_some(engine, 8, vocabulary=TINY_VOCABULARY)
    assert run_audits(engine) == {"same": 8}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["demo", "hybrid"])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param({}, marks=pytest.mark.long, id="cpu"),
        pytest.param({"device": "cuda", "dtype": "bfloat16"}, marks=pytest.mark.gpu, id="gpu"),
    ],
)
def test_two_thousand_requests_give_no_false_alarm(kind: str, place: dict[str, object], hybrid: str) -> None:
    """They come at random, so that audits are interrupted; the depth changes meanwhile."""
    path, vocabulary = (DEMO, DEMO_VOCABULARY) if kind == "demo" else (hybrid, TINY_VOCABULARY)
    engine = LocalEngine(config_of(path, **{"kv_cache_memory_bytes": 5 << 19, **place}))
    chance, num_submitted = random.Random(5), 0
    while num_submitted < 2000:
        submit_some(engine, 5, vocabulary=vocabulary, seed=num_submitted)
        num_submitted += 5
        engine.engine.scheduler.set_depth(chance.randint(0, 3))
        for _ in range(chance.choice([0, 5, 40, 120])):
            engine.step()
    outcomes = run_audits(engine)
    assert "different" not in outcomes
    assert outcomes["same"] > 500, outcomes


def test_grammars_and_requests_that_were_cut_short_are_audited() -> None:
    engine = LocalEngine(config_of(), token_table=TABLE)
    grammar = Grammar(json_schema_source(json.dumps(SCHEMA)), None)
    for seed in range(3):
        engine.submit(
            [40 + seed, 50], max_tokens=50, stop_token_ids=[3],
            sampling=SamplingParams(temperature=0.8, seed=seed), grammar=grammar,
        )  # fmt: skip
    engine.run()
    cut = engine.submit([5, 6, 7], max_tokens=200)
    while len(engine.outputs[cut].token_ids) < 20:
        engine.step()
    engine.post.inbox.append(Abort(cut, FinishReason.STOP))
    engine.outputs[cut].finish_reason = FinishReason.STOP
    assert run_audits(engine) == {"same": 4}


def test_requests_without_tokens_and_those_that_failed_are_not_audited() -> None:
    engine = LocalEngine(config_of())
    unread = engine.submit([5, 6, 7], max_tokens=200)
    engine.post.inbox.append(Abort(unread))
    engine.outputs[unread].finish_reason = FinishReason.ABORT
    refused = engine.submit([DEMO_VOCABULARY], max_tokens=5)
    assert run_audits(engine) == {}
    assert engine.outputs[refused].finish_reason is FinishReason.ERROR


def test_statistics_are_those_of_the_requests_alone() -> None:
    """All but the steps and the time that the device worked."""
    found = []
    for rate in (0.0, 1.0):
        engine = LocalEngine(config_of(audit_rate=rate, max_running=4))
        submit_some(engine, 8, vocabulary=DEMO_VOCABULARY)
        run_audits(engine)
        found.append(msgspec.to_builtins(stats_of(engine)))
    differing = {key for key in found[0] if found[0][key] != found[1][key]}
    assert differing <= {
        "audits_by_outcome", "num_steps", "num_step_tokens", "num_steps_by_tokens", "stage_seconds",
    }  # fmt: skip


def test_audits_neither_find_nor_leave_cached_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(config_of())
    hits: dict[int, int] = {}
    match = PrefixCache.match

    def noting(cache: PrefixCache, request: Request) -> list[int]:
        found = match(cache, request)
        hits[request.request_id] = len(found)
        return found

    monkeypatch.setattr(PrefixCache, "match", noting)
    for _ in range(2):
        engine.submit(range(100), max_tokens=20)
        engine.run()
    num_cached = stats_of(engine).num_kv_blocks_cached + stats_of(engine).num_kv_blocks_used
    assert run_audits(engine) == {"same": 2}
    assert (hits[0], hits[1], hits[-1], hits[-2]) == (0, 6, 0, 0)
    assert stats_of(engine).num_kv_blocks_cached <= num_cached


def num_steps(engine: LocalEngine, request_id: int) -> int:
    """Steps until the request has ended."""
    for count in range(10_000):
        if engine.outputs[request_id].finish_reason is not None:
            return count
        engine.step()
    raise AssertionError("it does not end")


def test_a_request_that_comes_finds_the_engine_as_if_nothing_was_audited() -> None:
    """All rows are audits' when it comes, and the queue has room for no further request."""
    engine, idle = (
        LocalEngine(config_of(max_running=2, max_waiting=2, max_model_len=200, audit_rate=rate, threads=1))
        for rate in (1.0, 0.0)
    )
    for seed in range(4):
        engine.submit([1, 2, seed], max_tokens=20)
        engine.run()
    engine.step()
    scheduler = engine.engine.scheduler
    assert scheduler.state.num_audits
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    prompts = [[3, 4, 5], [6, 7]]
    ids = [[each.submit(prompt, max_tokens=12) for prompt in prompts] for each in (engine, idle)]
    engine.step()
    assert scheduler.state.num_audits == 0
    assert abs(num_steps(engine, ids[0][1]) + 1 - num_steps(idle, ids[1][1])) <= 1
    assert [engine.outputs[i].token_ids for i in ids[0]] == [idle.outputs[i].token_ids for i in ids[1]]
    assert run_audits(engine) == {"same": 6}
    assert stats_of(engine).num_preemptions == 0


@pytest.mark.parametrize("kind", ["demo", "hybrid", "grammar"])
def test_an_audit_that_is_interrupted_goes_on_where_it_was(kind: str, hybrid: str) -> None:
    """An audit of 60 tokens, and a short request after every few steps of it."""
    engine = LocalEngine(config_of(hybrid if kind == "hybrid" else DEMO), token_table=TABLE)
    engine.loop._auditor = audit.Auditor(engine.engine.scheduler, 1.0, draw=lambda: 0.0)
    engine.submit(
        range(70), max_tokens=60, stop_token_ids=[3], sampling=SamplingParams(temperature=0.9, seed=1),
        grammar=Grammar(json_schema_source(json.dumps(SCHEMA)), None) if kind == "grammar" else None,
    )  # fmt: skip
    engine.run()
    engine.loop._auditor._rate = 0.0
    num_interruptions = 0
    while engine.loop._auditor.num_open:
        for _ in range(6):
            engine.step()
        engine.submit([5], max_tokens=2)
        engine.run()
        num_interruptions += 1
    assert stats_of(engine).audits_by_outcome == {"same": 1}
    assert 2 < num_interruptions < 40


def test_audits_take_an_eighth_of_the_blocks_or_are_alone() -> None:
    engine = LocalEngine(config_of(max_running=4))
    num_tokens = engine.engine.scheduler.num_kv_tokens
    for length in (1, num_tokens // 16 - 10):
        for seed in range(4):
            engine.submit([seed] * min(length, 200), max_tokens=8)
    engine.run()
    most = 0
    while engine.loop._auditor.num_open:
        engine.step()
        state = engine.engine.scheduler.state
        held = [len(request.prompt_token_ids) + request.max_tokens for request in state.running]
        assert len(held) <= 1 or sum(held) <= num_tokens / 8
        most = max(most, len(held))
    assert most > 1


def test_older_requests_than_may_wait_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_QUEUED", 3)
    engine = LocalEngine(config_of(max_running=8))
    for seed in range(8):
        engine.submit([1, 2, seed], max_tokens=2 + seed)
    assert run_audits(engine) == {"dropped": 5, "same": 3}


def test_an_audit_that_fails_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request did not fail."""
    engine = LocalEngine(config_of())
    engine.submit([1, 2, 3], max_tokens=8)
    engine.run()
    reader = engine.engine.scheduler._reader
    monkeypatch.setattr(type(reader), "_read_row", lambda *_: 1 / 0)
    assert run_audits(engine) == {"different": 1}
    assert "after token 1 it failed (" in caplog.text


@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_the_rate_is_the_share_that_is_audited(rate: float, share: float) -> None:
    engine = LocalEngine(config_of())
    draws: Iterator[float] = cycle(i / 16 for i in range(16))
    engine.loop._auditor = audit.Auditor(engine.engine.scheduler, rate, draw=lambda: next(draws))
    for seed in range(16):
        engine.submit([1, seed], max_tokens=3)
    assert sum(run_audits(engine).values()) == share * 16


# --- faults that are found
# -----------------------------------------------------------------------------------


def rewinds_one_token_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that rejects a draft at one of a few positions keeps the first rejected one in its cache."""
    original = round_step.verify_and_rewind

    def faulty(rows: Any, window: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        emitted: torch.Tensor = original(rows, window, *args, **kwargs)
        has_rejected = emitted[:, 0] < window.token_ids.shape[1]
        lengths = rows.kv_lengths[: len(emitted)]
        lengths += (has_rejected & (lengths >= 12) & (lengths < 20)).to(lengths.dtype)
        return emitted

    monkeypatch.setattr(round_step, "verify_and_rewind", faulty)


def takes_a_stale_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix hit ends with a block of other tokens."""
    original = PrefixCache.match

    def faulty(cache: PrefixCache, request: Request) -> list[int]:
        found = original(cache, request)
        return [*found[:-1], found[0]] if len(found) > 1 else found

    monkeypatch.setattr(PrefixCache, "match", faulty)


def takes_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix hit goes on from the recurrent state of another prefix."""
    original = PrefixCache.checkpoint

    def faulty(cache: PrefixCache, request: Request) -> int | None:
        found = original(cache, request)
        kept = [] if cache._checkpoints is None else list(cache._checkpoints._kept.values())
        return next((other for other in kept if other != found), found) if found is not None else None

    monkeypatch.setattr(PrefixCache, "checkpoint", faulty)


@pytest.mark.parametrize(
    "plant",
    [
        rewinds_one_token_too_few,
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in (takes_a_stale_block, takes_another_state)
        ),
    ],
)
def test_a_fault_is_found_within_twenty_requests(
    plant: Callable[[pytest.MonkeyPatch], None],
    hybrid: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    path, vocabulary = (hybrid, TINY_VOCABULARY) if plant is takes_another_state else (DEMO, DEMO_VOCABULARY)
    engine = LocalEngine(config_of(path))
    chance = random.Random(3)
    prefixes = [[chance.randrange(vocabulary) for _ in range(80)] for _ in range(2)]
    outcomes: dict[str, int] = {}
    with caplog.at_level(logging.ERROR):
        for number in range(20):
            prompt = prefixes[number % 2] if number % 4 > 1 else []
            prompt = [*prompt, *(chance.randrange(vocabulary) for _ in range(9))]
            request_id = engine.submit(prompt, max_tokens=100)
            while len(engine.outputs[request_id].token_ids) < 16:
                engine.step()
            engine.post.inbox.append(Abort(request_id, FinishReason.STOP))
            engine.outputs[request_id].finish_reason = FinishReason.STOP
            outcomes = run_audits(engine)
            if "different" in outcomes:
                break
    assert outcomes.get("different", 0) > 0, outcomes
    assert sum(outcomes.values()) == number + 1
    lines = [record.getMessage() for record in caplog.records if "audit: request" in record.getMessage()]
    assert len(lines) == outcomes["different"]
    assert all("without drafts and cached prefixes" in line for line in lines)


def rounds_scores_of_drafted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of rounds with drafts are off by their last bit; nothing else is."""
    original = round_step.RoundOutcome.score

    def faulty(outcome: round_step.RoundOutcome, rows: torch.Tensor) -> torch.Tensor:
        scores = original(outcome, rows)
        return scores.nextafter(torch.zeros_like(scores)) if outcome.depth else scores

    monkeypatch.setattr(round_step.RoundOutcome, "score", faulty)


def scores_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a request with a grammar has the log-probability of masked logits while another
    request runs."""
    original = prompt_ends.pick_tokens

    def faulty(*args: Any, keeps_logits: bool = False, **kwargs: Any) -> torch.Tensor:
        rows = args[1]
        return original(*args, keeps_logits=keeps_logits and rows.processors is None, **kwargs)

    monkeypatch.setattr(prompt_ends, "pick_tokens", faulty)


def rounds_scores_of_prompts_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a prompt's tokens are off by their last bit where it is computed beside another one."""
    original = prompt_ends.PromptEnds._score_prompt

    def faulty(ends: Any, chunk: Any, hidden: torch.Tensor) -> Any:
        found = original(ends, chunk, hidden)
        is_alone = len(hidden) == len(chunk.token_ids)
        return (
            found if found is None or is_alone else (found[0], found[1].nextafter(torch.zeros_like(found[1])))
        )

    monkeypatch.setattr(prompt_ends.PromptEnds, "_score_prompt", faulty)


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (rounds_scores_of_drafted_tokens, r"token \d+ has other log-probabilities"),
        (scores_masked_logits, "token 1 has other log-probabilities"),
        (rounds_scores_of_prompts_beside_others, "the prompt has other log-probabilities"),
    ],
)
def test_a_fault_of_log_probabilities_alone_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plant(monkeypatch)
    engine = LocalEngine(config_of(), token_table=TABLE)
    engine.loop._auditor._rate = 0.0
    running = engine.submit(
        [9], max_tokens=60, sampling=SamplingParams(temperature=0.0, presence_penalty=0.5)
    )
    engine.step()
    engine.loop._auditor._rate = 1.0
    scored = SamplingParams(temperature=0.0, num_logprobs=2, num_prompt_logprobs=1)
    grammar = Grammar(json_schema_source(json.dumps(SCHEMA)), None)
    for first in range(40, 43):
        engine.submit([first, 50], max_tokens=30, stop_token_ids=[3], sampling=scored, grammar=grammar)
    outcomes = run_audits(engine)
    assert outcomes["different"] > 0
    assert sum(outcomes.values()) == 3
    assert engine.outputs[running].finish_reason is FinishReason.LENGTH
    assert re.search(told, caplog.text)


def test_an_interrupted_audit_goes_on_comparing_log_probabilities() -> None:
    engine = LocalEngine(config_of())
    scored = SamplingParams(temperature=0.8, seed=4, num_logprobs=3, num_prompt_logprobs=2)
    engine.submit(range(40), max_tokens=40, sampling=scored)
    engine.run()
    while (open_audits := engine.loop._auditor.num_open) == 1 and not engine.loop._auditor._running:
        engine.step()
    assert open_audits == 1
    for _ in range(3):
        for _ in range(4):
            engine.step()
        engine.submit([5], max_tokens=2)
        engine.run()
    assert set(run_audits(engine)) == {"same"}


# --- where audits mean nothing
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"dtype": "bfloat16"}, "in torch.bfloat16 on cpu; use --dtype float32"),
        ({"synthetic_acceptance": (0.9, 0.8, 0.7)}, "with --synthetic-acceptance; leave one of them out"),
    ],
)
def test_where_a_text_may_differ_without_a_fault_audits_are_refused(
    fields: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=r"--audit-rate is 0.5, but .* " + problem):
        assemble(config_of(audit_rate=0.5, **fields), progress=lambda _: None)


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_rates_beyond_the_limits_are_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=rf"--audit-rate is {rate}, it must be 0 to 1"):
        config_of(audit_rate=rate)
