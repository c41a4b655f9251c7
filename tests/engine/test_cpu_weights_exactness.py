"""Weights in 8 bits on a CPU give one text, another than the full ones', whatever the depth, the batch, the
cache and the threads."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from headway_testing.eagle import constructed_eagle
from headway_testing.exactness import Case, generate, generate_with
from headway_testing.local import LocalEngine

from headway.engine import build as assembly
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.layers.model_pair import ModelPair
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.kernels import Int8CpuWeight, has_int8_products

pytestmark = pytest.mark.skipif(not has_int8_products(), reason="needs an x86 CPU with AVX2")

MODEL = str(files("headway.engine.demo"))
MAX_TOKENS = 32


def config_of(**changes: object) -> EngineConfig:
    fields = {"model_path": MODEL, "cpu_weights": "int8", "device": "cpu", "kv_cache_memory_bytes": 1 << 24}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


def cases() -> list[Case]:
    """Greedy and sampled, of lengths about the borders of blocks."""
    return [
        Case(
            tuple(text[: 30 + 7 * seed]), MAX_TOKENS, SamplingParams(temperature=0.8 * (seed % 2), seed=seed)
        )
        for seed, text in enumerate(heldout_prompts()[:6])
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return generate(cases(), config_of(depth=0, threads=1))


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_a_depth_changes_no_text(plain: list[list[int]], drafter: str) -> None:
    for depth in (1, 2, 3, 4):
        assert generate(cases(), config_of(depth=depth, drafter=drafter)) == plain, depth


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_others_a_warm_cache_chunks_and_threads_change_no_text(plain: list[list[int]], threads: int) -> None:
    engine = LocalEngine(config_of(threads=threads, prefill_chunk=16))
    assert [generate_with(engine, [case])[0] for case in cases()] == plain
    assert generate_with(engine, cases()) == plain
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 0


def test_every_layer_is_of_8_bits_and_the_text_is_another(
    plain: list[list[int]],
) -> None:
    model = LocalEngine(config_of()).engine
    assert model.info.cpu_weights == "int8"
    target = model.runner.model
    assert all(isinstance(linear.stored, Int8CpuWeight) for linear in target.linears())
    assert generate(cases(), config_of(depth=0, cpu_weights="full")) != plain


@pytest.mark.parametrize("is_itself", [False, True], ids=["eagle3", "draft-model"])
def test_a_drafter_in_a_folder_is_of_8_bits_too(is_itself: bool, tmp_path: Path) -> None:
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
    assert all(isinstance(linear.stored, Int8CpuWeight) for linear in linears)
    drafted = engine.generate(range(9), max_tokens=30)
    assert drafted == LocalEngine(config_of(model_path=str(model), depth=0)).generate(range(9), max_tokens=30)
    output = engine.outputs[0]
    assert output.num_accepted == output.num_drafted > 0
