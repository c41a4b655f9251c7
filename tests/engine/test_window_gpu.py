"""Families with sliding windows and soft caps on a GPU: what their CPU tests promise, and the CPU's texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.exactness import Case, generate_with
from headway_testing.families import save, tiny_model
from headway_testing.local import LocalEngine

from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ARCHITECTURES = ("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
# Heads as the published models have them, and sums that tensor cores take.
REAL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 1024,
}
# Less than a block, and the tiles of keys of several kernels with a key more.
WINDOWS = (9, 129)
LENGTHS = (1, 8, 9, 10, 16, 17, 64, 65, 127, 128, 129, 130, 200, 400)
CHANGES = {
    "depth 3": {},
    "chunks of 48": {"prefill_chunk": 48},
    "chunks of 100, mixed": {"prefill_chunk": 100, "mixed_above_tokens": 0},
    "few blocks": {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 512},
}


def cases_of(length_of_texts: int, *, most: int) -> list[Case]:
    """Prompts that repeat themselves, so that n-grams are right at times; every second text is drawn."""
    tokens = torch.randint(0, 151, (40,), generator=torch.Generator().manual_seed(0)).repeat(10).tolist()
    return [
        Case(tuple(tokens[:length]), length_of_texts, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, length in enumerate(LENGTHS)
        if length <= most
    ]


def engine_of(folder: Path, **changes: object) -> LocalEngine:
    fixed = {"model_path": str(folder), "depth": 3, "drafter": "ngram", "max_running": 16}
    return LocalEngine(EngineConfig(**(fixed | {"kv_cache_memory_bytes": 1 << 25} | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_changes_a_text(architecture: str, window: int, tmp_path: Path) -> None:
    folder = save(tiny_model(architecture, sliding_window=window, **REAL), architecture, tmp_path)
    cases = cases_of(40, most=400)
    alone = engine_of(folder, dtype="bfloat16", depth=0, prefix_caching=False)
    plain = [generate_with(alone, [case])[0] for case in cases]
    for name, changes in CHANGES.items():
        engine = engine_of(folder, dtype="bfloat16", **changes)
        for prefixes in ("computed", "found"):
            assert generate_with(engine, cases) == plain, (name, prefixes)
        stats = engine.engine.scheduler.snapshot()
        assert stats.num_accepted_tokens > 0
        assert name == "few blocks" or stats.num_cached_prompt_tokens > 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_float32_texts_are_those_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    folder = save(tiny_model(architecture), architecture, tmp_path)
    cases = cases_of(30, most=200)
    wanted = generate_with(engine_of(folder, dtype="float32", device="cpu", depth=0), cases)
    assert generate_with(engine_of(folder, dtype="float32"), cases) == wanted
