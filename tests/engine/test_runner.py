"""What the runner does before the first request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo, random_qwen2
from headway_testing.local import LocalEngine

from headway.engine.config import EngineConfig


@pytest.mark.parametrize("make", [constructed_mimo, random_qwen2], ids=lambda make: make.__name__)
def test_warming_up_a_prefill_leaves_nothing_behind(make: Callable[[Path], Path], tmp_path: Path) -> None:
    fresh, warmed = (LocalEngine(EngineConfig(model_path=str(make(tmp_path / name)))) for name in "ab")
    runner = warmed.engine.runner
    with torch.inference_mode():
        runner._warm_up_prefill()
    kept = runner.pool.block_hidden
    for tensor in (runner.pool.keys, runner.pool.values, *([] if kept is None else [kept[:-1]])):
        assert not bool(tensor.any())
    prompt = list(range(1, 40))
    assert warmed.generate(prompt, max_tokens=20) == fresh.generate(prompt, max_tokens=20)
