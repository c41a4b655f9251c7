"""One to three MTP layers: every draft is the oracle's, which is built of transformers' layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, random_mimo
from headway_testing.local import LocalEngine
from headway_testing.oracle import Oracle
from headway_testing.padded import PaddedLaunches
from headway_testing.proposals import DEPTH, Proposals, note_proposals, text_of

from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.protocol.config import MIN_BLOCK_SIZE, MIN_PREFILL_CHUNK, EngineConfig

VOCAB = 151


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return note_proposals(monkeypatch)


@cache
def oracle_of(num_layers: int) -> Oracle:
    return Oracle(dtype=torch.float64, num_draft_layers=num_layers)


def config_of(path: Path, **changes: object) -> EngineConfig:
    fixed = {
        "model_path": str(path), "device": "cpu", "dtype": "float64", "depth": DEPTH, "drafter": "mtp",
        "block_size": MIN_BLOCK_SIZE, "max_running": 4, "kv_cache_memory_bytes": 1 << 25,
    }  # fmt: skip
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_layers", "is_padded"),
    [
        pytest.param(1, False, id="1-plain", marks=pytest.mark.slow),
        pytest.param(3, True, id="3-padded"),
        *(
            pytest.param(num_layers, is_padded, id=f"{num_layers}-{name}", marks=pytest.mark.long)
            for num_layers, is_padded, name in (
                (1, True, "padded"), (2, False, "plain"), (2, True, "padded"), (3, False, "plain"),
            )
        ),
    ],
)  # fmt: skip
def test_every_draft_is_the_oracles(
    num_layers: int, is_padded: bool, proposals: Proposals, tmp_path: Path
) -> None:
    """Across chunks of prompts, prefix hits, rejected and accepted drafts, and spells of every depth."""
    oracle = oracle_of(num_layers)
    path = oracle.save(tmp_path / "model", with_head=True)
    engine = LocalEngine(
        config_of(path, prefill_chunk=MIN_PREFILL_CHUNK, synthetic_acceptance=(0.8, 0.7, 0.6, 0.5))
    )
    if is_padded:
        grid = StepGrid(row_counts(4), prompt_counts=(16, 64), mixed_counts=(16, 64))
        padded = PaddedLaunches(engine.engine.runner, grid)
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCAB) for _ in range(n)] for n in (1, 2, 3, 17, 32, 75)]
    texts = text_of(engine, prompts, 70)
    again = [text[: len(text) - 20] for text in texts[2:]]
    texts += text_of(engine, again, 40)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens >= 64 * len(again)
    if is_padded:
        assert len(padded.launched) > 50
    assert_oracles(oracle, texts, proposals)


def assert_oracles(oracle: Oracle, texts: list[list[int]], proposals: Proposals) -> None:
    assert {len(drafts) for _, _, drafts in proposals} == {1, 2, 3, DEPTH}
    assert len(proposals) > 100
    for seed, length, drafts in proposals:
        known = torch.tensor(texts[seed][: length + 1])
        num_valid = min(len(drafts), len(texts[seed]) - 1 - length)  # no pair stands at the last token
        wanted = oracle.draft_chain(known, num_valid).argmax(-1)
        assert drafts[:num_valid] == wanted.tolist(), (seed, length)


@pytest.mark.parametrize("make", [random_mimo, constructed_mimo], ids=["random", "constructed"])
@pytest.mark.parametrize("num_layers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_no_depth_changes_the_text(num_layers: int, make: Callable[..., Path], tmp_path: Path) -> None:
    """Every draft of the constructed model is accepted, whichever layer makes it."""
    path = make(tmp_path / "model", num_nextn_predict_layers=num_layers)
    texts = []
    for depth in range(DEPTH + 1):
        engine = LocalEngine(config_of(path, dtype="float32", depth=depth))
        for number in range(4):
            engine.submit([(7 * number + i) % 90 for i in range(1 + 9 * number)], max_tokens=30)
        texts.append([output.token_ids for output in engine.run().values()])
        stats = engine.engine.scheduler.snapshot()
        if make is constructed_mimo:
            assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position
        assert depth == 0 or stats.draft_tokens_per_position[depth - 1] > 0
    assert texts == [texts[0]] * (DEPTH + 1)
