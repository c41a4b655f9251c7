"""A thinking budget closes the reasoning at exactly its token, whatever the drafts, the company and the
memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine, Output
from headway_testing.padded import PaddedLaunches, SplitSteps

from headway.engine.execution.step_key import StepGrid
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams, ThinkingBudget

VOCAB, CONTEXT, AFTER, MAX_TOKENS = 128, 128, 8, 40
BUDGETS = (0, 1, 5, 32)
DEPTHS = (0, 1, 2, 3)
BLOCK_BYTES = (2 * 3 * 16 * 2 * 16 + 64) * 8  # keys and values of three layers, and a hidden state
SAMPLINGS = [SamplingParams(temperature=t, seed=s) for t, s in ((0.0, 0), (0.8, 5))]


@dataclass(frozen=True)
class Case:
    """A request, and the MAX_TOKENS tokens that it says without a budget."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    plain: tuple[int, ...]

    def with_budget(self, num_tokens: int, end_id: int) -> SamplingParams:
        budget = ThinkingBudget(num_tokens, end_id)
        return msgspec.structs.replace(self.sampling, thinking_budget=budget)

    def new_id(self, num_tokens: int) -> int:
        """A token that neither stands in the first tokens of the plain text nor would follow them."""
        return next(i for i in range(VOCAB) if i not in self.plain[: num_tokens + 1])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose head is right for some drafts, not for all."""
    folder = tmp_path_factory.mktemp("model") / "mimo"
    return str(constructed_mimo(folder, noise=0.08, max_position_embeddings=CONTEXT))


def engine_of(model_path: str, **options: object) -> LocalEngine:
    """float64, where no two tokens tie by accident."""
    return LocalEngine(EngineConfig(model_path=model_path, dtype="float64", **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cases(model_path: str) -> list[Case]:
    engine = engine_of(model_path, depth=0)
    cases = []
    for index, sampling in enumerate(SAMPLINGS):
        prompt = tuple(range(10 * index + 1, 10 * index + 18))
        plain = tuple(engine.generate(prompt, max_tokens=MAX_TOKENS, sampling=sampling))
        cases.append(Case(prompt, sampling, plain))
    return cases


def length_of(sampling: SamplingParams) -> int:
    """A few tokens beyond the budget's, of the longest windows one and a part of the next."""
    budget = sampling.thinking_budget
    return MAX_TOKENS if budget is None else budget.num_tokens + AFTER


def run(engine: LocalEngine, asked: Sequence[tuple[Case, SamplingParams]]) -> list[Output]:
    """All at once."""
    ids = [
        engine.submit(case.prompt, max_tokens=length_of(sampling), sampling=sampling)
        for case, sampling in asked
    ]
    engine.run()
    return [engine.outputs.pop(request_id) for request_id in ids]


def texts_of(engine: LocalEngine, asked: Sequence[tuple[Case, SamplingParams]]) -> list[list[int]]:
    return [output.token_ids for output in run(engine, asked)]


@pytest.fixture(scope="module")
def asked(cases: list[Case]) -> list[tuple[Case, SamplingParams]]:
    """Every case with every budget, with one whose end comes by itself, and without any."""
    budgeted = [(case, case.with_budget(n, case.new_id(n))) for n in BUDGETS for case in cases]
    ended = [(case, case.with_budget(32, case.plain[20])) for case in cases]
    return budgeted + ended + [(case, case.sampling) for case in cases]


@pytest.fixture(scope="module")
def expected(model_path: str, asked: list[tuple[Case, SamplingParams]]) -> list[list[int]]:
    """Each alone, without drafts."""
    engine = engine_of(model_path, depth=0)
    return [texts_of(engine, [one])[0] for one in asked]


def test_the_end_stands_at_exactly_its_place_and_nothing_changes_before_it(
    asked: list[tuple[Case, SamplingParams]], expected: list[list[int]]
) -> None:
    for (case, sampling), text in zip(asked, expected, strict=True):
        budget = sampling.thinking_budget
        assert len(text) == length_of(sampling)
        if budget is None or budget.end_id in case.plain[: budget.num_tokens]:
            assert text == list(case.plain)
            continue
        before = list(case.plain[: budget.num_tokens])
        assert text[: budget.num_tokens + 1] == [*before, budget.end_id]
        assert text[budget.num_tokens] != case.plain[budget.num_tokens]


@pytest.mark.parametrize("depth", [*(pytest.param(d, marks=pytest.mark.long) for d in (1, 2)), 3])
def test_a_budget_ends_at_the_same_token_at_every_depth(
    model_path: str,
    asked: list[tuple[Case, SamplingParams]],
    expected: list[list[int]],
    depth: int,
) -> None:
    engine = engine_of(model_path, depth=depth)
    outputs = [run(engine, [one])[0] for one in asked]
    assert [output.token_ids for output in outputs] == expected
    num_drafted = sum(output.num_drafted for output in outputs)
    assert 0.1 < sum(output.num_accepted for output in outputs) / num_drafted < 0.9


@pytest.mark.parametrize(
    ("depth", "reads_late"),
    [
        pytest.param(0, False, marks=pytest.mark.long),
        (1, True),
        pytest.param(2, False, marks=pytest.mark.long),
        (3, True),
    ],
    ids=["0", "1 read late", "2", "3 read late"],
)
def test_a_crowd_with_and_without_budgets_changes_no_text(
    model_path: str,
    asked: list[tuple[Case, SamplingParams]],
    expected: list[list[int]],
    depth: int,
    reads_late: bool,
) -> None:
    """More requests than rows, so that rows move and are taken again."""
    config = EngineConfig(
        model_path=model_path, dtype="float64", depth=depth, max_running=3, prefill_chunk=16
    )
    assert texts_of(LocalEngine(config, reads_late=reads_late), asked) == expected


@pytest.mark.parametrize("depth", [0, *(pytest.param(d, marks=pytest.mark.long) for d in (1, 2)), 3])
def test_a_preempted_request_keeps_its_budget(
    model_path: str, asked: list[tuple[Case, SamplingParams]], expected: list[list[int]], depth: int
) -> None:
    """9 blocks of 16 tokens for five rows of up to 57."""
    engine = engine_of(model_path, depth=depth, max_running=5, kv_cache_memory_bytes=9 * BLOCK_BYTES)
    assert texts_of(engine, asked) == expected
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


@pytest.mark.parametrize("launches", [PaddedLaunches, SplitSteps], ids=lambda kind: kind.__name__)
def test_padded_steps_give_the_same_text(
    model_path: str,
    asked: list[tuple[Case, SamplingParams]],
    expected: list[list[int]],
    launches: type[PaddedLaunches | SplitSteps],
) -> None:
    engine = engine_of(model_path, depth=3, max_running=8, prefill_chunk=16)
    launches(engine.engine.runner, StepGrid.of(8, 16, 16))
    assert texts_of(engine, asked) == expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_that_came_before_is_not_repeated(model_path: str, cases: list[Case], depth: int) -> None:
    """Whichever of the tokens before the budget's it is: the first one, and each place of the windows."""
    asked = [
        (case, case.with_budget(num_tokens, case.plain[place]))
        for case in cases
        for num_tokens in (1, 6, 12)
        for place in range(max(num_tokens - 6, 0), num_tokens)
    ]
    for (case, _), text in zip(asked, texts_of(engine_of(model_path, depth=depth), asked), strict=True):
        assert text == list(case.plain[: len(text)])


@pytest.mark.parametrize("depth", DEPTHS)
def test_reasoning_that_the_model_did_not_open_is_not_closed(
    model_path: str, cases: list[Case], depth: int
) -> None:
    """The opening token is each of the last ones before the budget's place, then one that does not come
    before it."""
    num_tokens, case = 9, cases[1]
    end_id = case.new_id(20)
    openers = [*case.plain[3:num_tokens], next(i for i in range(VOCAB) if i not in case.plain[:num_tokens])]
    asked = [
        (case, msgspec.structs.replace(case.sampling, thinking_budget=ThinkingBudget(num_tokens, end_id, opener)))
        for opener in openers
    ]  # fmt: skip
    *closed, plain = texts_of(engine_of(model_path, depth=depth), asked)
    assert all(text[: num_tokens + 1] == [*case.plain[:num_tokens], end_id] for text in closed)
    assert plain == list(case.plain[: len(plain)])


def test_an_end_in_the_prompt_does_not_count(model_path: str, cases: list[Case]) -> None:
    engine, case = engine_of(model_path, depth=3), cases[1]
    end_id = next(i for i in case.prompt if i not in case.plain[:6])
    text = texts_of(engine, [(case, case.with_budget(5, end_id))])[0]
    assert text[:6] == [*case.plain[:5], end_id]


def test_an_end_that_is_masked_comes_all_the_same(model_path: str, cases: list[Case]) -> None:
    """By bias, as a bad word, as a stop token before min_tokens; its log-probability is that of the raw
    logits."""
    engine, case = engine_of(model_path, depth=3), cases[0]
    end_id = case.new_id(7)
    for changes in (
        {"allowed_token_ids": [i for i in range(VOCAB) if i != end_id]},
        {"bad_words_token_ids": [[end_id], [case.plain[6], end_id]]},
        {"logit_bias": {end_id: -100.0}, "top_p": 0.1, "top_k": 2, "num_logprobs": 1},
    ):
        sampling = msgspec.structs.replace(case.with_budget(7, end_id), **changes)
        output = run(engine, [(case, sampling)])[0]
        assert output.token_ids[:8] == [*case.plain[:7], end_id]
        assert output.finish_reason is FinishReason.LENGTH
    assert output.logprobs.ranks[7] > 2
    assert output.logprobs.logprobs[7] < output.logprobs.logprobs[6]


def test_an_end_that_stops_the_request_stops_it(model_path: str, cases: list[Case]) -> None:
    engine, case = engine_of(model_path, depth=3), cases[1]
    end_id = case.new_id(6)
    sampling = msgspec.structs.replace(case.with_budget(6, end_id), min_tokens=20)
    request_id = engine.submit(case.prompt, max_tokens=20, sampling=sampling, stop_token_ids=[end_id])
    output = engine.run()[request_id]
    assert (output.token_ids, output.finish_reason) == ([*case.plain[:6], end_id], FinishReason.STOP)
