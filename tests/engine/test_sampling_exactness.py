"""Every sampling field, alone and in pairs, gives at every depth what an oracle without rounds gives.

float64, where no two tokens tie by accident; the model's own head is right for some drafts, not for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import hypothesis.strategies as st
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, walk
from headway_testing.local import LocalEngine, Output
from headway_testing.one_by_one import Answer, Ask, answer, assert_scores, prompt_logits
from hypothesis import HealthCheck, assume, given, settings

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.layers.causal_lm import CausalLM
from headway.engine.loading.checkpoint import load_model
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import RequestError
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams, ThinkingBudget
from headway.engine.scheduling.limits import Limits
from headway.engine.scheduling.request import Request

VOCAB, CONTEXT = 128, 96
DEPTHS = (0, 1, 3)
DEMO = files("headway.engine.demo")
BLOCK_BYTES = (2 * 3 * 16 * 2 * 16 + 64) * 8  # keys and values of three layers, and a hidden state
TOKENS = st.integers(0, VOCAB - 1)


WALKS = st.builds(walk, TOKENS, st.integers(1, 5))
PENALTIES = st.sampled_from([-2.0, -0.5, 0.5, 2.0])
BIASES = st.sampled_from([-100.0, -4.0, 3.0, 6.0, 100.0])
# Floats are chosen so that float32 holds them.
FIELDS: dict[str, st.SearchStrategy[dict[str, object]]] = {
    "temperature": st.sampled_from([0.25, 1.0, 1.75]).map(lambda value: {"temperature": value}),
    "top_k": st.integers(1, 140).map(lambda value: {"top_k": value, "temperature": 1.5}),
    "top_p": st.sampled_from([0.125, 0.5, 0.875]).map(lambda value: {"top_p": value, "temperature": 1.5}),
    "min_p": st.sampled_from([0.03125, 0.25, 1.0]).map(lambda value: {"min_p": value, "temperature": 1.5}),
    "repetition_penalty": st.sampled_from([0.5, 1.25, 2.5]).map(lambda v: {"repetition_penalty": v}),
    "frequency_penalty": PENALTIES.map(lambda value: {"frequency_penalty": value}),
    "presence_penalty": PENALTIES.map(lambda value: {"presence_penalty": value}),
    "logit_bias": st.dictionaries(TOKENS, BIASES, min_size=1, max_size=30).map(lambda v: {"logit_bias": v}),
    "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=30).map(lambda v: {"allowed_token_ids": v}),
    "bad_words": st.lists(WALKS, min_size=1, max_size=60).map(lambda v: {"bad_words_token_ids": v}),
    "min_tokens": st.integers(1, 20).map(lambda value: {"min_tokens": value}),
    "thinking_budget": st.builds(ThinkingBudget, st.integers(0, 12), TOKENS, st.none() | TOKENS).map(
        lambda value: {"thinking_budget": value}
    ),
    "logprobs": st.integers(0, 20).map(lambda value: {"num_logprobs": value}),
    "prompt_logprobs": st.integers(0, 20).map(lambda value: {"num_prompt_logprobs": value}),
}
PAIRS = st.lists(st.sampled_from(sorted(FIELDS)), min_size=2, max_size=2, unique=True)


@st.composite
def asks(draw: st.DrawFn, names: Sequence[str] | None = None) -> Ask:
    """A request with these fields, or with a random pair of them."""
    fields: dict[str, object] = {"temperature": draw(st.sampled_from([0.0, 0.0, 1.0]))}
    for name in draw(PAIRS) if names is None else names:
        fields |= draw(FIELDS[name])
    ask = Ask(
        prompt=tuple(draw(WALKS) + draw(WALKS)),
        max_tokens=draw(st.integers(1, 14)),
        sampling=SamplingParams(seed=draw(st.integers(0, (1 << 64) - 1)), **fields),  # type: ignore[arg-type]
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=20))),
        max_draft_tokens=draw(st.sampled_from([None, None, 0, 2])),
    )
    assume(is_accepted(ask))
    return ask


def is_accepted(ask: Ask) -> bool:
    request = Request(0, list(ask.prompt), ask.sampling, ask.max_tokens, frozenset(ask.stop_token_ids))
    try:
        Limits(CONTEXT, VOCAB).check(request)
    except RequestError:
        return False
    return True


class Bench:
    """The oracle's model and an engine for each depth."""

    def __init__(self, model_path: str, **options: object) -> None:
        self.model: CausalLM = load_model(
            model_path,
            device=torch.device("cpu"),
            dtype="float64",
            make_draft=None,
            progress=lambda _: None,
        ).target
        self.engines = {
            depth: LocalEngine(
                EngineConfig(model_path=model_path, dtype="float64", depth=depth, **options),  # type: ignore[arg-type]
                reads_late=depth == 1,
            )
            for depth in DEPTHS
        }

    def check(self, asks: Sequence[Ask]) -> None:
        """All at once in each engine, against the oracle one by one."""
        answers = [answer(self.model, ask) for ask in asks]
        raw_prompts = [self.raw_prompt(ask) for ask in asks]
        for depth, engine in self.engines.items():
            ids = [submit(engine, ask) for ask in asks]
            engine.run()
            for ask, wanted, raw, request_id in zip(asks, answers, raw_prompts, ids, strict=True):
                got = engine.outputs.pop(request_id)
                compare(ask, wanted, got, f"depth {depth}, {ask}")
                wanted_top = ask.sampling.num_prompt_logprobs
                assert_scores(got.prompt_logprobs, ask.prompt[1:], raw, wanted_top)
            assert engine.engine.scheduler.snapshot().num_kv_blocks_used == 0

    def raw_prompt(self, ask: Ask) -> list[list[float]]:
        return [] if ask.sampling.num_prompt_logprobs is None else prompt_logits(self.model, ask.prompt)


def compare(ask: Ask, wanted: Answer, got: Output, where: str) -> None:
    assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason), where
    assert_scores(got.logprobs, wanted.token_ids, wanted.raw_logits, ask.sampling.num_logprobs)
    assert (got.prompt_logprobs is None) == (ask.sampling.num_prompt_logprobs is None), where


def submit(engine: LocalEngine, ask: Ask) -> int:
    return engine.submit(
        ask.prompt,
        max_tokens=ask.max_tokens,
        sampling=ask.sampling,
        stop_token_ids=ask.stop_token_ids,
        max_draft_tokens=ask.max_draft_tokens,
    )


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "mimo"
    return str(constructed_mimo(folder, noise=0.08, max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def bench(model_path: str) -> Bench:
    return Bench(model_path, max_running=3, prefill_chunk=16)


def examples(count: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=checks
    )


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("num_examples", [2, pytest.param(6, marks=pytest.mark.long)])
def test_each_field_alone(bench: Bench, num_examples: int, name: str) -> None:
    @examples(num_examples)
    @given(batch=st.lists(asks([name]), min_size=2, max_size=4))
    def check(batch: list[Ask]) -> None:
        bench.check(batch)

    check()


@pytest.mark.parametrize("num_examples", [6, pytest.param(300, marks=pytest.mark.long)])
def test_random_pairs_side_by_side(bench: Bench, num_examples: int) -> None:
    """Drafts must be taken and refused, or nothing is shown."""
    before = bench.engines[3].engine.scheduler.snapshot()

    @examples(num_examples)
    @given(batch=st.lists(asks(), min_size=3, max_size=6))
    def check(batch: list[Ask]) -> None:
        bench.check(batch)

    check()
    after = bench.engines[3].engine.scheduler.snapshot()
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0.1 < num_accepted / (after.num_draft_tokens - before.num_draft_tokens) < 0.9


EVERYTHING: dict[str, object] = {
    "repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {9: 3.0, 40: -5.0},
    "bad_words_token_ids": [walk(3, 2), walk(5, 3), [77]], "min_tokens": 3, "num_logprobs": 3, "thinking_budget": ThinkingBudget(4, 77),
}  # fmt: skip


def everything(prompt: Sequence[int], max_tokens: int, seed: int, **changes: object) -> Ask:
    sampling = SamplingParams(**EVERYTHING | {"temperature": 0.5, "seed": seed} | changes)  # type: ignore[arg-type]
    return Ask(tuple(prompt), max_tokens, sampling, tuple(walk(seed, 3)))


def test_all_fields_at_once_from_one_token_to_two_rounds_and_more(bench: Bench) -> None:
    bench.check([everything(walk(seed, 6), 1 + seed % 9, seed) for seed in range(9)])


def test_all_fields_at_once_up_to_the_end_of_the_context(bench: Bench) -> None:
    asks = [
        everything(walk(m, CONTEXT - m), m, m, num_prompt_logprobs=2 if m < 3 else None) for m in range(1, 10)
    ]
    bench.check(asks)


@pytest.mark.parametrize("temperature", [0.0, 0.5], ids=["greedy", "sampled"])
def test_stop_tokens_wait_for_min_tokens(bench: Bench, temperature: float) -> None:
    """Everything the model wants to say next is a stop token, from no wait to one beyond max_tokens."""
    bench.check(
        [
            Ask(
                tuple(walk(0, 4)),
                max_tokens=10,
                sampling=SamplingParams(temperature=temperature, min_tokens=min_tokens, seed=min_tokens),
                stop_token_ids=tuple(walk(0, 64)),
            )
            for min_tokens in (0, 1, 2, 3, 4, 5, 9, 10, 11, 12)
        ]
    )


def test_a_preempted_request_counts_what_it_had_said(model_path: str) -> None:
    """12 KV blocks of 16 tokens for five rows of up to 50 tokens; 18 where no MTP layer is loaded."""
    bench = Bench(model_path, max_running=5, kv_cache_memory_bytes=12 * BLOCK_BYTES)
    asks = [everything(walk(7 * i, 20), 30, i, num_prompt_logprobs=1) for i in range(6)]
    bench.check([Ask(ask.prompt, ask.max_tokens, ask.sampling) for ask in asks])
    assert all(e.engine.scheduler.snapshot().num_preemptions > 0 for e in bench.engines.values())


def test_a_prompt_whose_prefill_is_preempted_is_scored_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An older row grows by four tokens a round; the prompt is computed 16 tokens at a time, in turns with
    the rounds."""
    path = str(constructed_mimo(tmp_path_factory.mktemp("model") / "mimo", max_position_embeddings=CONTEXT))
    config = EngineConfig(
        model_path=path, dtype="float64", depth=3, prefill_chunk=16, kv_cache_memory_bytes=8 * BLOCK_BYTES
    )
    engine = LocalEngine(config)
    older = Ask(tuple(walk(1, 16)), 70, SamplingParams(temperature=0.0))
    scored = Ask(tuple(walk(90, 80)), 9, SamplingParams(temperature=0.0, num_prompt_logprobs=3))
    submit(engine, older)
    engine.step()
    newer = submit(engine, scored)
    for _ in range(8):
        engine.step()
    assert engine.engine.scheduler.snapshot().num_preemptions == 1
    assert engine.outputs[newer].events == []
    got = engine.run()[newer]
    model = load_model(
        path, device=torch.device("cpu"), dtype="float64", make_draft=None, progress=lambda _: None
    ).target
    assert_scores(got.prompt_logprobs, scored.prompt[1:], prompt_logits(model, scored.prompt), 3)


def test_drafts_follow_the_same_rules(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The head of this model knows all that the trunk knows: no rule makes a draft wrong."""
    path = constructed_mimo(tmp_path_factory.mktemp("model") / "mimo", noise=0.0)
    engine = LocalEngine(EngineConfig(model_path=str(path), dtype="float64", depth=3))
    for seed in range(12):
        submit(engine, everything(walk(seed, 6), 60, seed, min_tokens=50))
    engine.run()
    stats = engine.engine.scheduler.snapshot()
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.98


def test_a_scored_prompt_is_computed_anew_and_reused_by_others(bench: Bench) -> None:
    prompt = walk(11, 50)
    plain = Ask(tuple(prompt), 4, SamplingParams(temperature=0.0))
    scored = Ask(tuple(prompt), 4, SamplingParams(temperature=0.0, num_prompt_logprobs=5))
    bench.check([plain])
    for asks, cached in (([scored], 0), ([plain], 48)):
        before = {d: e.engine.scheduler.snapshot().num_cached_prompt_tokens for d, e in bench.engines.items()}
        bench.check(asks)
        for depth, engine in bench.engines.items():
            now = engine.engine.scheduler.snapshot().num_cached_prompt_tokens
            assert now - before[depth] == cached


def test_the_embedded_model_under_every_field() -> None:
    bench = Bench(str(DEMO), max_running=2, kv_cache_memory_bytes=1 << 26)
    prompts = [text[:40] for text in heldout_prompts()[:3]]
    bench.check(
        [
            everything(prompt, 8, seed, temperature=seed % 2, bad_words_token_ids=[prompt[3:5], [prompt[7]]])
            for seed, prompt in enumerate(prompts)
        ]
    )


def test_a_request_whose_masks_leave_nothing_is_refused(bench: Bench) -> None:
    sampling = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[4, 5]])
    for engine in bench.engines.values():
        output = engine.outputs[submit(engine, Ask((1,), 3, sampling))]
        engine.run()
        assert output.finish_reason is FinishReason.ERROR
        assert (output.events[0].error_code, output.token_ids) == ("invalid_value", [])
