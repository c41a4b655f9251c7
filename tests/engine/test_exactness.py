"""Speculation, batching, caching, chunking and preemption never change the text (DESIGN: the first promise).

The embedded model and real prompts; fp32 with the excuse of exactness.py, fp64 without any.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from importlib.resources import files

import pytest
from headway_testing.drafters import Guessing, Knowing
from headway_testing.exactness import Case, assert_same_text, generate, generate_with
from headway_testing.local import LocalEngine
from headway_testing.scripted_policy import ScriptedPolicy

from headway.engine.build import measured_policy
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.drafter import Drafter

DEMO = files("headway.engine.demo")
MODEL = str(DEMO)
VOCAB_SIZE = read_model_spec(MODEL).vocab_size
NUM_PROMPTS = 40
MAX_TOKENS = 200
SIZES = {"float32": 4, "float64": 8}  # bytes
KV_NUMBERS = 1 << 24  # more than any of these tests fills; an engine clears all of it when it starts
# The tests in float64 are long ones, which have the larger numbers and whole prompts.
NUM_TOKENS = {"float32": 36, "float64": 80}
LEAST_PROMPT = {"float32": 40, "float64": 1000}
DTYPES = ["float32", pytest.param("float64", marks=pytest.mark.long)]
MODES: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda seed: SamplingParams(temperature=0.0, seed=seed),
    "sampled": lambda seed: SamplingParams(temperature=0.8, top_p=0.95, seed=seed),
}
# Where the mode is not what a test is about: the drawn text, which differs where any logit does.
SAMPLED_FIRST = ["sampled", pytest.param("greedy", marks=pytest.mark.long)]


def each_once(one: str, other: str) -> list[object]:
    """Each of two kinds with one mode; with the other mode in the long tests."""
    pairs = [(one, "sampled"), (other, "greedy"), (one, "greedy"), (other, "sampled")]
    marks = [(), (), pytest.mark.long, pytest.mark.long]
    return [pytest.param(*pair, marks=mark) for pair, mark in zip(pairs, marks, strict=True)]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Held-out Python source, as token ids."""
    return [tuple(text) for text in heldout_prompts()[:NUM_PROMPTS]]


def begun(prompts: list[tuple[int, ...]], count: int, dtype: str) -> list[tuple[int, ...]]:
    """The first prompts, each in float32 up to another token of its blocks."""
    return [text[: LEAST_PROMPT[dtype] + 5 * index] for index, text in enumerate(prompts[:count])]


def cases_of(prompts: list[tuple[int, ...]], mode: str, max_tokens: int = MAX_TOKENS) -> list[Case]:
    return [Case(prompt, max_tokens, MODES[mode](seed)) for seed, prompt in enumerate(prompts)]


def config_of(**changes: object) -> EngineConfig:
    fields = {"model_path": MODEL, "dtype": "float32", "depth": 3} | changes
    memory = {"kv_cache_memory_bytes": SIZES[str(fields["dtype"])] * KV_NUMBERS}
    return EngineConfig(**(memory | fields))  # type: ignore[arg-type]


def eight(prompts: list[tuple[int, ...]], mode: str, dtype: str = "float32") -> list[Case]:
    return cases_of(begun(prompts, 8, dtype), mode, NUM_TOKENS[dtype])


@pytest.fixture(scope="module")
def plain_of_eight(prompts: list[tuple[int, ...]]) -> Callable[[str, str], list[list[int]]]:
    """By mode and dtype, what several tests compare with: the texts of eight prompts, without drafts."""

    @cache
    def write(mode: str, dtype: str) -> list[list[int]]:
        return generate(eight(prompts, mode, dtype), config_of(dtype=dtype, depth=0))

    return write


@pytest.mark.parametrize(("drafter", "mode"), each_once("mtp", "ngram"))
def test_a_depth_changes_no_text(
    prompts: list[tuple[int, ...]],
    plain_of_eight: Callable[[str, str], list[list[int]]],
    drafter: str,
    mode: str,
) -> None:
    """The shallowest and the deepest; the tests below are at depth 3, and the long one at each."""
    cases = eight(prompts, mode)
    plain = plain_of_eight(mode, "float32")
    for depth in (1, 4):
        drafted = generate(cases, config_of(depth=depth, drafter=drafter))
        assert_same_text(MODEL, cases, plain, drafted, dtype="float32")


@pytest.mark.parametrize(("chooser", "mode"), each_once("random", "measured"))
def test_a_depth_that_changes_with_the_rounds_changes_no_text(
    prompts: list[tuple[int, ...]],
    plain_of_eight: Callable[[str, str], list[list[int]]],
    chooser: str,
    mode: str,
) -> None:
    """The policy that a server has, and one that jumps between all depths."""
    cases = eight(prompts, mode)
    engine = LocalEngine(config_of(chooses_depth=True))
    is_random = chooser == "random"
    policy = ScriptedPolicy(chance=random.Random(0)) if is_random else measured_policy(engine.engine)
    engine.engine.scheduler.set_depth_policy(policy)  # type: ignore[arg-type]
    drafted = generate_with(engine, cases)
    assert_same_text(MODEL, cases, plain_of_eight(mode, "float32"), drafted, dtype="float32")
    rounds = engine.engine.scheduler.snapshot().rounds_by_depth
    assert len(rounds) == 4 if is_random else max(rounds) > 0, rounds


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_depth_changes_a_long_text(
    prompts: list[tuple[int, ...]], dtype: str, drafter: str, mode: str
) -> None:
    cases = cases_of(prompts, mode)
    plain = generate(cases, config_of(dtype=dtype, depth=0))
    assert all(len(tokens) == MAX_TOKENS for tokens in plain)
    for depth in (1, 2, 3, 4):
        drafted = generate(cases, config_of(dtype=dtype, depth=depth, drafter=drafter))
        assert_same_text(MODEL, cases, plain, drafted, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_sixteen_at_once_write_what_each_writes_alone(
    prompts: list[tuple[int, ...]], mode: str, dtype: str
) -> None:
    cases = cases_of(begun(prompts, 16, dtype), mode, max_tokens={"float32": 14, "float64": 30}[dtype])
    engine = LocalEngine(config_of(dtype=dtype, prefix_caching=False))
    alone = [generate_with(engine, [case])[0] for case in cases]
    assert_same_text(MODEL, cases, alone, generate_with(engine, cases), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_a_warm_prefix_cache_changes_nothing_at_any_block_boundary(
    prompts: list[tuple[int, ...]], dtype: str, mode: str
) -> None:
    text = max(prompts, key=len)
    cases = cases_of(
        [text[:length] for length in range(1, 3 * 16 + 3)],
        mode,
        max_tokens={"float32": 8, "float64": 24}[dtype],
    )
    cold = generate(cases, config_of(dtype=dtype, prefix_caching=False))
    engine = LocalEngine(config_of(dtype=dtype))
    generate_with(engine, cases)
    warm = generate_with(engine, cases)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 16 * len(cases) // 2
    assert_same_text(MODEL, cases, cold, warm, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_a_conversation_reuses_what_rounds_wrote(
    prompts: list[tuple[int, ...]], mode: str, dtype: str
) -> None:
    engine = LocalEngine(config_of(dtype=dtype))
    num_tokens = {"float32": 36, "float64": 70}[dtype]
    first = cases_of(begun(prompts, 8, dtype), mode, num_tokens)
    answers = generate_with(engine, first)
    second = [
        Case((*case.prompt, *answer, *case.prompt[:9]), num_tokens // 2, case.sampling)
        for case, answer in zip(first, answers, strict=True)
    ]
    before = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
    warm = generate_with(engine, second)
    reused = engine.engine.scheduler.snapshot().num_cached_prompt_tokens - before
    assert reused > sum(len(case.prompt) + num_tokens - 6 for case in first) - 8 * 16
    cold = generate(second, config_of(dtype=dtype, prefix_caching=False))
    assert_same_text(MODEL, second, cold, warm, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
@pytest.mark.parametrize(
    ("num_texts", "num_prompts", "max_tokens"), [(2, 2, 12), pytest.param(8, 3, 40, marks=pytest.mark.long)]
)
def test_the_size_of_prefill_chunks_does_not_matter(
    prompts: list[tuple[int, ...]], num_texts: int, num_prompts: int, max_tokens: int, mode: str, dtype: str
) -> None:
    """The prompts of a text have more tokens than the largest chunk."""
    long = [sum(prompts[i : i + num_prompts], ()) for i in range(0, num_prompts * num_texts, num_prompts)]
    cases = cases_of(long, mode, max_tokens)
    assert min(len(text) for text in long) > 256
    whole = generate(cases, config_of(dtype=dtype, prefill_chunk=2048))
    for size in (16, 37, 256):
        chunked = generate(cases, config_of(dtype=dtype, prefill_chunk=size))
        assert_same_text(MODEL, cases, whole, chunked, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    prompts: list[tuple[int, ...]], mode: str, depth: int, dtype: str
) -> None:
    num_prompts, num_tokens, megabytes = {"float32": (8, 36, 3), "float64": (12, 100, 7)}[dtype]
    cases = cases_of(begun(prompts, num_prompts, dtype), mode, num_tokens)
    calm = generate(cases, config_of(dtype=dtype, depth=depth))
    engine = LocalEngine(
        config_of(
            dtype=dtype, depth=depth, max_model_len=256, kv_cache_memory_bytes=SIZES[dtype] * megabytes << 18
        )
    )
    crowded = generate_with(engine, cases)
    assert engine.engine.scheduler.snapshot().num_preemptions > 0
    assert_same_text(MODEL, cases, calm, crowded, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_planning_a_step_before_the_last_is_read_changes_nothing(
    prompts: list[tuple[int, ...]], mode: str, dtype: str
) -> None:
    least, more = {"float32": (10, 4), "float64": (20, 9)}[dtype]
    whole = cases_of(begun(prompts, 10, dtype), mode)
    cases = [Case(case.prompt, least + more * i, case.sampling) for i, case in enumerate(whole)]
    config = config_of(dtype=dtype, max_running=5)
    at_once = generate(cases, config)
    late = generate_with(LocalEngine(config, reads_late=True), cases)
    assert_same_text(MODEL, cases, at_once, late, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
@pytest.mark.parametrize(
    ("drafter_name", "acceptance"),
    [("random", (0.0, 0.05)), ("always wrong", (0.0, 0.0)), ("always right", (1.0, 1.0))],
)
def test_no_drafter_changes_the_text(
    prompts: list[tuple[int, ...]],
    plain_of_eight: Callable[[str, str], list[list[int]]],
    mode: str,
    drafter_name: str,
    acceptance: tuple[float, float],
    dtype: str,
) -> None:
    cases = eight(prompts, mode, dtype)
    plain = plain_of_eight(mode, dtype)
    texts = {c.sampling.seed: [*c.prompt, *tokens] for c, tokens in zip(cases, plain, strict=True)}
    drafters: dict[str, Drafter] = {
        "random": Guessing(VOCAB_SIZE),
        "always wrong": Knowing(texts, VOCAB_SIZE, shift=1),
        "always right": Knowing(texts, VOCAB_SIZE, shift=0),
    }
    engine = LocalEngine(config_of(dtype=dtype), drafter=drafters[drafter_name])
    assert_same_text(MODEL, cases, plain, generate_with(engine, cases), dtype=dtype)
    stats = engine.engine.scheduler.snapshot()
    low, high = acceptance
    assert low <= stats.num_accepted_tokens / stats.num_draft_tokens <= high


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_rows_capped_at_depth_0_stand_beside_rows_at_3(
    prompts: list[tuple[int, ...]],
    plain_of_eight: Callable[[str, str], list[list[int]]],
    mode: str,
    dtype: str,
) -> None:
    cases = eight(prompts, mode, dtype)
    plain = plain_of_eight(mode, dtype)
    mixed = [
        Case(case.prompt, case.max_tokens, case.sampling, max_draft_tokens=(0, 1, 2, None)[i % 4])
        for i, case in enumerate(cases)
    ]
    engine = LocalEngine(config_of(dtype=dtype))
    assert_same_text(MODEL, mixed, plain, generate_with(engine, mixed), dtype=dtype)
    drafted = [engine.outputs[i].num_drafted for i in range(len(mixed))]
    assert [count > 0 for count in drafted] == [case.max_draft_tokens != 0 for case in mixed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
def test_requests_without_drafts_run_shallow_rounds_and_leave_no_trace(
    prompts: list[tuple[int, ...]], mode: str, dtype: str
) -> None:
    """Their rounds fill no slot of the MTP layer, so only their prompts are found again."""
    engine = LocalEngine(config_of(dtype=dtype))
    cases = cases_of(begun(prompts, 8, dtype), mode, NUM_TOKENS[dtype] // 2)
    plain = [Case(case.prompt, case.max_tokens, case.sampling, max_draft_tokens=0) for case in cases]
    answers = generate_with(engine, plain)
    assert set(engine.engine.scheduler.snapshot().rounds_by_depth) == {0}
    again = [
        Case((*case.prompt, *answer), NUM_TOKENS[dtype] // 2, case.sampling)
        for case, answer in zip(cases, answers, strict=True)
    ]
    warm = generate_with(engine, again)
    cached = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
    assert cached == sum(len(case.prompt) // 16 * 16 for case in cases)
    cold = LocalEngine(config_of(dtype=dtype, prefix_caching=False))
    assert_same_text(MODEL, again, generate_with(cold, again), warm, dtype=dtype)
    first, second = (e.engine.scheduler.snapshot().num_accepted_tokens for e in (engine, cold))
    assert first > 0.95 * second


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SAMPLED_FIRST)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_the_last_tokens_before_the_end_of_the_context(
    prompts: list[tuple[int, ...]], mode: str, depth: int, dtype: str
) -> None:
    context = 96
    text = max(prompts, key=len)
    cases = [
        Case(text[: context - max_tokens], max_tokens, MODES[mode](max_tokens))
        for max_tokens in range(1, 2 * depth + 4)
    ]
    plain = generate(cases, config_of(dtype=dtype, depth=0, max_model_len=context))
    drafted = generate(cases, config_of(dtype=dtype, depth=depth, max_model_len=context))
    assert [len(tokens) for tokens in drafted] == [case.max_tokens for case in cases]
    assert_same_text(MODEL, cases, plain, drafted, dtype=dtype)
