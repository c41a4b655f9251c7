"""Drafts of the MTP head, whichever way the pass over the pending pairs is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine

from headway.engine.protocol.config import EngineConfig
from headway.engine.speculation import draft as draft_module


@pytest.mark.parametrize("block_size", [16, 32])
def test_passes_that_go_on_with_the_last_pair_alone_draft_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    """Beside rows that start, end and are padding, at all depths: drafts that are right, and what is in the cache."""
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    config = EngineConfig(model_path=path, depth=4, dtype="float64", block_size=block_size, prefill_chunk=48)
    engines: list[LocalEngine] = []
    for few_rows in (0, 1 << 30):
        monkeypatch.setattr(draft_module, "FEW_ROWS", few_rows)
        engine = LocalEngine(config)
        for number in range(7):
            cap = (None, 2, 0)[number % 3]
            engine.submit(range(number, 9 * number + 1), max_tokens=9 + 5 * number, max_draft_tokens=cap)
            engine.step()
        engine.run()
        engines.append(engine)
    first, second = engines
    for number, output in first.outputs.items():
        assert second.outputs[number].token_ids == output.token_ids
        assert second.outputs[number].num_accepted == output.num_accepted
    stats = first.engine.scheduler.snapshot()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 1.0
    assert stats.accepted_tokens_per_position[3] > 0
    for name in ("keys", "values"):
        pools = [getattr(engine.engine.runner.pool, name) for engine in engines]
        torch.testing.assert_close(pools[1], pools[0], rtol=0, atol=1e-12)
