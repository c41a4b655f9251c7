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


def test_prompts_attended_in_windows_give_the_same_text(tmp_path: Path) -> None:
    path = str(constructed_mimo(tmp_path / "model", noise=0.06))
    engines = [LocalEngine(EngineConfig(model_path=path, prefill_chunk=100)) for _ in range(2)]
    engines[1].engine.runner._prefill_window = 8
    prompts = [[(7 * i + length) % 90 for i in range(length)] for length in (20, 20, 5, 60, 33)]
    ids = [[engine.submit(prompt, max_tokens=30) for prompt in prompts] for engine in engines]
    outputs = [engine.run() for engine in engines]
    assert ids[0] == ids[1]
    assert [outputs[0][i].token_ids for i in ids[0]] == [outputs[1][i].token_ids for i in ids[1]]
