"""Processes that share a model compute what one computes alone, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.ranks import assert_shared_alike, computed, computed_by_processes, shareable_folder

from headway.engine.layers.group import ALONE


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "architecture", ["MiMoForCausalLM", "LlamaForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
)
def test_processes_compute_the_bits_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    folder, meeting = shareable_folder(tmp_path / "model", architecture), tmp_path / "meeting"
    meeting.mkdir()
    ranks = computed_by_processes(folder, meeting, size)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = computed(folder, ALONE)
    torch.set_num_threads(num_threads)
    assert_shared_alike(alone, ranks)
