"""Weights in 4 and 8 bits on a CPU give one text each, another than the full ones', whatever the depth, the
batch, the cache and the threads."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from headway_testing.eagle import constructed_eagle
from headway_testing.exactness import Case, generate_with
from headway_testing.hybrid import constructed_hybrid
from headway_testing.local import LocalEngine

from headway.engine import build as assembly
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.layers.model_pair import ModelPair
from headway.engine.protocol.config import CpuWeights, EngineConfig
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.sampling_params import SamplingParams
from headway.kernels import IntegerCpuExperts, IntegerCpuWeight, has_integer_products

pytestmark = pytest.mark.skipif(
    not has_integer_products(), reason="needs Linux, an x86 CPU with AVX2 and a compiler"
)

MODEL = str(files("headway.engine.demo"))
MAX_TOKENS = 32


def config_of(**changes: object) -> EngineConfig:
    fields = {"model_path": MODEL, "cpu_weights": "int4", "device": "cpu", "kv_cache_memory_bytes": 1 << 24}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def cases() -> list[Case]:
    """Greedy and sampled, of lengths about the borders of blocks."""
    return [
        Case(
            tuple(text[: 30 + 7 * seed]),
            MAX_TOKENS,
            SamplingParams(temperature=0.8 * (seed % 2), seed=seed, num_logprobs=2),
        )
        for seed, text in enumerate(heldout_prompts()[:6])
    ]


def answers(engine: LocalEngine, cases: list[Case]) -> list[tuple[list[int], TokenLogprobs]]:
    """Returns the tokens of each case and their log-probabilities; all are submitted at once."""
    first = len(engine.outputs)
    generate_with(engine, cases)
    found = [engine.outputs[first + number] for number in range(len(cases))]
    return [(output.token_ids, output.logprobs) for output in found]


@pytest.fixture(scope="module", params=["int4", pytest.param("int8", marks=pytest.mark.long)])
def weights(request: pytest.FixtureRequest) -> CpuWeights:
    found: CpuWeights = request.param
    return found


@pytest.fixture(scope="module")
def plain(weights: CpuWeights) -> list[tuple[list[int], TokenLogprobs]]:
    """Each alone, without drafts, on one thread."""
    engine = LocalEngine(config_of(depth=0, threads=1, cpu_weights=weights, prefix_caching=False))
    return [answers(engine, [case])[0] for case in cases()]


@pytest.mark.parametrize(
    ("drafter", "depths"), [("mtp", (1, 2, 3, 4)), ("ngram", (3,))], ids=["mtp", "ngram"]
)
def test_a_depth_changes_no_answer(
    plain: list[tuple[list[int], TokenLogprobs]], weights: CpuWeights, drafter: str, depths: tuple[int, ...]
) -> None:
    for depth in depths:
        engine = LocalEngine(config_of(depth=depth, drafter=drafter, cpu_weights=weights))
        assert answers(engine, cases()) == plain, depth


@pytest.mark.parametrize(
    "threads", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_others_a_warm_cache_chunks_and_threads_change_no_answer(
    plain: list[tuple[list[int], TokenLogprobs]], weights: CpuWeights, threads: int
) -> None:
    engine = LocalEngine(config_of(threads=threads, prefill_chunk=16, cpu_weights=weights))
    assert [answers(engine, [case])[0] for case in cases()] == plain
    assert answers(engine, cases()) == plain
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 0


def test_preemption_changes_no_answer(
    plain: list[tuple[list[int], TokenLogprobs]], weights: CpuWeights
) -> None:
    engine = LocalEngine(
        config_of(depth=3, cpu_weights=weights, max_model_len=128, kv_cache_memory_bytes=10 << 17)
    )
    assert answers(engine, cases()) == plain
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


def test_every_layer_is_of_few_bits_and_the_text_is_another(
    plain: list[tuple[list[int], TokenLogprobs]], weights: CpuWeights
) -> None:
    model = LocalEngine(config_of(cpu_weights=weights)).engine
    assert model.info.cpu_weights == weights
    *layers, lm_head = [linear.stored for linear in model.runner.model.linears()]
    assert isinstance(lm_head, IntegerCpuWeight)
    assert lm_head.bits == 8
    for weight in layers:
        assert isinstance(weight, IntegerCpuWeight)
        assert weight.bits == (4 if weights == "int4" else 8)
    assert answers(LocalEngine(config_of(depth=0, cpu_weights="full")), cases()) != plain


@pytest.mark.parametrize("is_itself", [False, True], ids=["eagle3", "draft-model"])
def test_a_drafter_in_a_folder_is_of_few_bits_too(is_itself: bool, tmp_path: Path) -> None:
    """A head whose every draft of the full model is right, and the model as its own drafter."""
    model, head = constructed_eagle(tmp_path, "original")
    drafter = str(model if is_itself else head)
    models: list[ModelPair] = []
    load = assembly.load_drafter

    def noted(*given: Any, **options: Any) -> ModelPair:
        models.append(load(*given, **options))
        return models[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "load_drafter", noted)
        engine = LocalEngine(config_of(model_path=str(model), drafter_path=drafter, depth=3))
    draft = models[0].draft
    assert draft is not None
    linears = list(draft.linears())
    assert linears
    assert all(isinstance(linear.stored, IntegerCpuWeight) for linear in linears)
    drafted = engine.generate(range(9), max_tokens=30)
    assert drafted == LocalEngine(config_of(model_path=str(model), depth=0)).generate(range(9), max_tokens=30)
    output = engine.outputs[0]
    assert output.num_accepted == output.num_drafted > 0


def test_experts_are_of_few_bits_and_no_depth_changes_their_text(tmp_path: Path) -> None:
    path = str(constructed_hybrid(tmp_path, noise=0.1, architecture="Qwen3_5MoeForCausalLM"))
    prompts = [
        Case(
            tuple(range(1 + seed, 40 + 9 * seed)),
            MAX_TOKENS,
            SamplingParams(temperature=0.8 * (seed % 2), seed=seed),
        )
        for seed in range(6)
    ]
    alone = LocalEngine(config_of(model_path=path, depth=0, threads=1, prefix_caching=False))
    layers = list(alone.engine.runner.model.experts())
    assert layers
    assert all(isinstance(matrix, IntegerCpuExperts) for layer in layers for matrix in layer.weights)
    plain = [answers(alone, [case])[0] for case in prompts]
    for changes in ({"depth": 3}, {"depth": 2, "drafter": "ngram", "threads": 2, "prefill_chunk": 64}):
        engine = LocalEngine(config_of(model_path=path, **changes))
        assert answers(engine, prompts) == plain
        assert engine.engine.scheduler.snapshot().num_accepted_tokens > 0
