"""Speculation, batches, chunks, prefix hits and preemption never change the text of a mixture of experts, in
float32.

Tiny models with random weights, whose tokens choose experts of their own. What layers compute of a token is
the same to the last bit among any others, so that no tie is excused.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.exactness import Case, generate, generate_with
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import LAYERS, HybridOracle
from headway_testing.local import LocalEngine

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

LENGTHS = (1, 15, 17, 33, 63, 64, 65, 100)
ARCHITECTURES = (
    "Qwen3_5MoeForCausalLM", "Qwen3MoeForCausalLM",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("Qwen3NextForCausalLM", "MixtralForCausalLM")),
)  # fmt: skip


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("model") / "model"
    if request.param in LAYERS:
        return str(HybridOracle(architecture=request.param).save(folder))
    return str(save(tiny_model(request.param), request.param, folder))


def config_of(path: str, **changes: object) -> EngineConfig:
    fixed = {
        "model_path": path, "dtype": "float32", "depth": 3, "kv_cache_memory_bytes": 1 << 23, "max_running": 16, "drafter": "auto",
    }  # fmt: skip
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]


def cases_of(lengths: tuple[int, ...], max_tokens: int) -> list[Case]:
    """Every second one is drawn."""
    return [
        Case(
            tuple(torch.randint(0, 151, (length,), generator=torch.Generator().manual_seed(length)).tolist()),
            max_tokens,
            SamplingParams(temperature=0.7 * (seed % 2), seed=seed),
        )
        for seed, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return cases_of(LENGTHS, 10)


@pytest.fixture(scope="module")
def plain(path: str, cases: list[Case]) -> list[list[int]]:
    """Each alone, without drafts."""
    engine = LocalEngine(config_of(path, depth=0, prefix_caching=False))
    return [generate_with(engine, [case])[0] for case in cases]


@pytest.mark.parametrize(
    "depth", [0, 1, *(pytest.param(depth, marks=pytest.mark.long) for depth in (2, 3)), 4]
)
def test_no_depth_changes_a_text_in_a_crowd(
    depth: int, path: str, cases: list[Case], plain: list[list[int]]
) -> None:
    for drafter in ("auto", "ngram"):
        assert generate(cases, config_of(path, depth=depth, drafter=drafter)) == plain


def test_no_chunk_size_and_no_prefix_hit_changes_a_text(
    path: str, cases: list[Case], plain: list[list[int]]
) -> None:
    assert generate(cases, config_of(path, prefill_chunk=64, mixed_above_tokens=0)) == plain
    engine = LocalEngine(config_of(path))
    assert generate_with(engine, cases) == generate_with(engine, cases[::-1])[::-1] == plain
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 0


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(path: str) -> None:
    cases = cases_of((30, 64, 70, 100), 40)
    calm = generate(cases, config_of(path, prefix_caching=False))
    small = LocalEngine(config_of(path)).engine.runner.pool.block_bytes() * 18
    engine = LocalEngine(config_of(path, kv_cache_memory_bytes=small))
    assert generate_with(engine, cases) == calm
    assert engine.engine.scheduler.snapshot().num_preemptions > 0
