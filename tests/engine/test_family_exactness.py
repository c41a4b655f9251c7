"""For a tiny random model of every family: no drafter, depth, chunk size, batch or prefix hit changes the
text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.exactness import Case, assert_same_text, generate, generate_with
from headway_testing.families import CLASSES, save, tiny_model
from headway_testing.hybrid import LAYERS, HybridOracle
from headway_testing.local import LocalEngine
from headway_testing.marks import slow_but

from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

LENGTHS = (1, 15, 16, 17, 33, 90)


def config_of(folder: Path, **changes: object) -> EngineConfig:
    fixed = {"model_path": str(folder), "dtype": "float64", "depth": 3, "kv_cache_memory_bytes": 1 << 24}
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", slow_but(["MiMoForCausalLM", "Qwen3_5MoeForCausalLM"], CLASSES))
def test_nothing_but_the_request_decides_the_text(architecture: str, tmp_path: Path) -> None:
    if architecture == "MiMoForCausalLM":
        random_mimo(tmp_path)
    elif architecture in LAYERS:
        HybridOracle(architecture=architecture).save(tmp_path)
    else:
        save(tiny_model(architecture), architecture, tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 151, (max(LENGTHS),), generator=generator).tolist()
    cases = [
        Case(tuple(tokens[:length]), 14, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, length in enumerate(LENGTHS)
    ]
    plain = [generate([case], config_of(tmp_path, depth=0, prefix_caching=False))[0] for case in cases]
    chunk = read_model_spec(tmp_path).prompt_grid or 16
    for drafter in ("auto", "ngram"):
        config = config_of(tmp_path, drafter=drafter)
        chunked = generate(cases, msgspec.structs.replace(config, prefill_chunk=chunk, prefix_caching=False))
        engine = LocalEngine(config)
        cold, warm = generate_with(engine, cases), generate_with(engine, cases)
        assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens > 0
        for found in (chunked, cold, warm):
            assert_same_text(str(tmp_path), cases, plain, found, dtype="float64")
