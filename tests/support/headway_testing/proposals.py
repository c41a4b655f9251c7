"""The drafts that a drafter proposes to the rows of an engine whose depth goes up and down."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headway.engine.protocol.config import MIN_BLOCK_SIZE, EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.drafter import Drafter
from headway.engine.speculation.mtp import MtpDrafter
from headway.engine.state.row_tensors import RowTensors
from headway_testing.local import LocalEngine

Proposals = list[tuple[int, int, list[int]]]  # the row's seed, L and the drafts
DEPTH = 4


def note_proposals(monkeypatch: pytest.MonkeyPatch, kind: type[Drafter] = MtpDrafter) -> Proposals:
    """Returns a list of what such a drafter proposes to live rows from now on, in turn."""
    seen: Proposals = []
    propose = kind.propose

    def noting(drafter: Drafter, rows: RowTensors, depth: int) -> object:
        proposed = propose(drafter, rows, depth)
        is_live = (rows.kv_lengths < rows.limits).tolist()
        found = zip(rows.seeds.tolist(), rows.kv_lengths.tolist(), proposed.tolist(), strict=True)
        seen.extend(entry for entry, lives in zip(found, is_live, strict=True) if lives)
        return proposed

    monkeypatch.setattr(kind, "propose", noting)
    return seen


def text_of(engine: LocalEngine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Submits the prompts, runs while the depth goes up and down, and returns prompts with outputs. Seeds are
    numbers of requests."""
    ids = [
        engine.submit(
            prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0, seed=len(engine.outputs)),
        )
        for prompt in prompts
    ]
    for depth, num_steps in ((DEPTH, 9), (1, 5), (0, 4), (2, 3), (0, 11), (DEPTH, 3), (1, 20), (3, 2)):
        engine.engine.scheduler.set_depth(depth)
        for _ in range(num_steps):
            engine.step()
    engine.engine.scheduler.set_depth(DEPTH)
    engine.run()
    return [[*prompt, *engine.outputs[i].token_ids] for prompt, i in zip(prompts, ids, strict=True)]


def random_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]


def drafting_config(model: Path, folder: Path, **changes: object) -> EngineConfig:
    """Returns the configuration of a small engine whose drafter is in a folder of its own."""
    fixed = {
        "model_path": str(model), "drafter_path": str(folder), "device": "cpu", "dtype": "float64",
        "depth": DEPTH, "block_size": MIN_BLOCK_SIZE, "max_running": 4, "kv_cache_memory_bytes": 1 << 25,
    }  # fmt: skip
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]
