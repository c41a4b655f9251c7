"""An engine of any family, and with any drafter, writes with several ranks what it writes with one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headway_testing.crowd import random_sampling
from headway_testing.eagle import constructed_eagle
from headway_testing.families import CLASSES
from headway_testing.local import LocalEngine
from headway_testing.ranks import shareable_folder

from headway.engine.protocol.config import EngineConfig

pytestmark = pytest.mark.slow

NUM_REQUESTS, VOCAB = 24, 100
HYBRID = "Qwen3_5MoeForCausalLM"


def answers_of(folder: Path, size: int, **changes: Any) -> list[object]:
    """Texts, log-probabilities and the drafts that were accepted, of a crowd."""
    fields: dict[str, Any] = {"depth": 2, "max_running": 6, "max_model_len": 128} | changes
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        threads=1,
        tensor_parallel_size=size,
        kv_cache_memory_bytes=(1 << 22) // size,
        **fields,
    )
    engine, chance = LocalEngine(config), random.Random(5)
    try:
        for index in range(NUM_REQUESTS):
            engine.submit(
                [chance.randrange(VOCAB) for _ in range(chance.choice([1, 17, 40, 80]))],
                max_tokens=chance.choice([1, 9, 30]),
                sampling=random_sampling(chance, is_plain=index % 2 == 0),
            )
        outputs = list(engine.run().values())
    finally:
        if engine.engine.ranks is not None:
            engine.engine.ranks.close()
    assert engine.engine.info.num_ranks == size
    if config.depth > 0 and engine.engine.info.drafter != "none":
        assert sum(output.num_drafted for output in outputs) > 0
    return [
        (output.token_ids, output.logprobs, output.prompt_logprobs, output.num_accepted) for output in outputs
    ]


@pytest.mark.parametrize("architecture", CLASSES)
def test_ranks_write_what_one_writes(architecture: str, tmp_path: Path) -> None:
    folder = shareable_folder(tmp_path, architecture)
    alone = answers_of(folder, 1)
    assert all(answers_of(folder, size) == alone for size in (2, 4))


def eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    model, drafter = constructed_eagle(folder, "original")
    return model, {"drafter_path": str(drafter)}


def own_drafts(folder: Path) -> tuple[Path, dict[str, Any]]:
    model = shareable_folder(folder, "Qwen3ForCausalLM")
    return model, {"drafter_path": str(model)}


def ngrams(folder: Path) -> tuple[Path, dict[str, Any]]:
    return shareable_folder(folder, HYBRID), {"drafter": "ngram"}


def drawn(folder: Path) -> tuple[Path, dict[str, Any]]:
    return shareable_folder(folder, HYBRID), {"load_format": "dummy", "chooses_depth": True}


def quantized(folder: Path) -> tuple[Path, dict[str, Any]]:
    return shareable_folder(folder, HYBRID), {"quantize": "fp8"}


@pytest.mark.parametrize("make", [eagle, own_drafts, ngrams, drawn, quantized])
def test_ranks_draft_and_load_as_one(
    make: Callable[[Path], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, changes = make(tmp_path)
    assert answers_of(folder, 2, **changes) == answers_of(folder, 1, **changes)
