"""Relaxed acceptance while a request reasons: it changes the text there, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from headway_testing.checkpoints import random_mimo
from headway_testing.local import GREEDY, LocalEngine

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.sampling_params import RelaxedThinking, SamplingParams, ThinkingBudget
from headway.engine.scheduling.plan import NO_REASONING, reasoning_of
from headway.engine.scheduling.request import Request
from headway.engine.speculation import relaxed

# Every draft of any probability is taken.
ALL = (10**6, 1.0)
NEVER, NUM_TOKENS = 10**6, 60  # no token has this id, so that reasoning never ends
PROMPTS = [[(7 * number + 3 * place) % 90 for place in range(4 + number)] for number in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_mimo(tmp_path_factory.mktemp("relaxed"))


def config_of(path: Path, **changes: Any) -> EngineConfig:
    return msgspec.structs.replace(EngineConfig(model_path=str(path), depth=3, max_running=8), **changes)


def reasoning(end_id: int, start_id: int | None = None, **others: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, relaxed_thinking=RelaxedThinking(end_id, start_id), **others)


def texts(engine: LocalEngine, samplings: list[SamplingParams]) -> list[list[int]]:
    """Of one request a prompt, all at once."""
    for prompt, sampling in zip(PROMPTS, samplings, strict=True):
        engine.submit(prompt, max_tokens=NUM_TOKENS, sampling=sampling)
    return [output.token_ids for output in engine.run().values()]


@pytest.fixture(scope="module")
def plain(path: Path) -> LocalEngine:
    """Without drafts, and without the rule."""
    return LocalEngine(config_of(path, depth=0))


@pytest.fixture(scope="module")
def exact(plain: LocalEngine) -> list[list[int]]:
    return [plain.generate(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("reads_late", [False, True], ids=["at once", "late"])
def test_drafts_are_taken_while_a_request_reasons_and_others_stay_exact(
    path: Path, exact: list[list[int]], reads_late: bool
) -> None:
    """The first requests end first, so that rows move."""
    engine = LocalEngine(config_of(path, relaxed_thinking=ALL), reads_late=reads_late)
    for number, prompt in enumerate(PROMPTS):
        sampling = reasoning(NEVER) if number % 2 else GREEDY
        engine.submit(prompt, max_tokens=NUM_TOKENS - 9 * (5 - number), sampling=sampling)
    outputs = engine.run()
    for number, output in outputs.items():
        assert (output.token_ids == exact[number][: len(output.token_ids)]) == (number % 2 == 0)
        assert (output.num_accepted == output.num_drafted) == (number % 2 == 1)
    assert engine.engine.scheduler.snapshot().num_lossy_requests == 3
    assert not engine.engine.info.is_deterministic


@pytest.mark.parametrize(
    "num_preempted", [pytest.param(0, marks=pytest.mark.slow), 9], ids=["undisturbed", "preempted"]
)
def test_what_follows_the_reasoning_is_what_the_model_says(
    path: Path, plain: LocalEngine, num_preempted: int
) -> None:
    """The end may stand among the drafts of a window, whose rest is verified as ever. A preempted request
    knows how far its reasoning had come; its drafts, and so its text, are others."""
    lossy = texts(LocalEngine(config_of(path, relaxed_thinking=ALL)), [reasoning(NEVER)] * len(PROMPTS))
    ends = [text[20 + number] for number, text in enumerate(lossy)]
    engine = LocalEngine(config_of(path, relaxed_thinking=ALL))
    for prompt, end_id in zip(PROMPTS, ends, strict=True):
        engine.submit(prompt, max_tokens=NUM_TOKENS, sampling=reasoning(end_id))
    for turn in range(num_preempted):
        engine.step()
        engine.engine.scheduler.preempt(turn % len(PROMPTS))
    engine.run()
    num_ended = num_changed = 0
    for number, (prompt, end_id) in enumerate(zip(PROMPTS, ends, strict=True)):
        text = engine.outputs[number].token_ids
        if end_id not in text:
            continue
        place = text.index(end_id) + 1
        assert text[place:] == plain.generate([*prompt, *text[:place]], max_tokens=len(text) - place)
        num_ended += 1
        num_changed += text[:place] != plain.generate(prompt, max_tokens=place)
    assert min(num_ended, num_changed) >= 3


def test_reasoning_that_the_model_opens_begins_with_its_first_token(
    path: Path, exact: list[list[int]]
) -> None:
    engine = LocalEngine(config_of(path, relaxed_thinking=ALL))
    opened = [text[0] if number % 2 else NEVER for number, text in enumerate(exact)]
    found = texts(engine, [reasoning(NEVER, start_id) for start_id in opened])
    assert [lossy == true for lossy, true in zip(found, exact, strict=True)] == [True, False] * 3


@pytest.mark.parametrize("rule", [(1, 1.0), (10**6, 0.0)], ids=["the most probable", "no gap"])
def test_a_strict_rule_changes_no_greedy_text(
    path: Path, exact: list[list[int]], rule: tuple[int, float]
) -> None:
    engine = LocalEngine(config_of(path, relaxed_thinking=rule))
    assert texts(engine, [reasoning(NEVER)] * len(PROMPTS)) == exact


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 0.5},
        pytest.param({"thinking_budget": ThinkingBudget(9, 5)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adjusted_logits_are_verified_exactly(path: Path, change: dict[str, Any]) -> None:
    expected = texts(LocalEngine(config_of(path)), [msgspec.structs.replace(GREEDY, **change)] * len(PROMPTS))
    engine = LocalEngine(config_of(path, relaxed_thinking=ALL))
    assert texts(engine, [reasoning(NEVER, **change)] * len(PROMPTS)) == expected
    assert engine.engine.scheduler.snapshot().num_lossy_requests == 0


def test_nothing_of_it_runs_unless_the_configuration_asks_for_it(
    path: Path, exact: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("an exact engine relaxes nothing")

    monkeypatch.setattr(relaxed, "relax_acceptance", fail)
    engine = LocalEngine(config_of(path))
    assert engine.engine.runner.launcher.context.relaxed is None
    assert texts(engine, [reasoning(NEVER)] * len(PROMPTS)) == exact
    with pytest.raises(AssertionError, match="relaxes nothing"):
        texts(LocalEngine(config_of(path, relaxed_thinking=ALL)), [GREEDY] * len(PROMPTS))


@pytest.mark.parametrize(
    ("output", "start_id", "phase"),
    [
        ([], None, 1),
        ([4, 5], None, 1),
        ([4, 9, 5], None, 0),
        ([], 3, 2),
        ([3, 4], 3, 1),
        ([4, 3], 3, 0),
        ([3, 9], 3, 0),
    ],
    ids=str,
)
def test_the_phase_after_the_output_so_far(output: list[int], start_id: int | None, phase: int) -> None:
    request = Request(0, [3, 9, 1], reasoning(9, start_id), max_tokens=8, output_token_ids=output)
    assert reasoning_of(request) == (phase, -1 if start_id is None else start_id, 9)


def test_a_request_without_reasoning_takes_over_nothing(path: Path, exact: list[list[int]]) -> None:
    assert reasoning_of(Request(0, [1], GREEDY, max_tokens=8)) == NO_REASONING
    engine = LocalEngine(config_of(path, relaxed_thinking=ALL, max_running=1))
    engine.submit(PROMPTS[0], max_tokens=9, sampling=reasoning(NEVER))
    engine.run()
    engine.submit(PROMPTS[1], max_tokens=NUM_TOKENS)
    assert engine.run()[1].token_ids == exact[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"deterministic": True}, "excludes --deterministic; leave one of them out"),
        ({"audit_rate": 0.1}, "excludes --audit-rate; leave one of them out"),
        ({"synthetic_acceptance": (0.5, 0.5, 0.5)}, "excludes --synthetic-acceptance; leave one of them out"),
        ({"depth": 0}, "nothing drafts; leave it out, or use --drafter ngram"),
        ({"drafter": "none"}, "nothing drafts; leave it out, or use --drafter ngram"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_promises_exact_texts_excludes_it(path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--relaxed-thinking is LOSSY.* {problem}"):
        LocalEngine(config_of(path, relaxed_thinking=ALL, **changes))


@pytest.mark.parametrize("rule", [(0, 0.5), (2**31, 0.5), (2, -0.1), (2, 1.1), (2, float("nan"))], ids=str)
def test_rules_that_mean_nothing_are_refused(rule: tuple[int, float]) -> None:
    with pytest.raises(
        ConfigError, match=rf"--relaxed-thinking is {rule[0]},.*, it must be a number of tokens"
    ):
        EngineConfig(model_path="", relaxed_thinking=rule)
