"""Processes that share a model compute what one computes alone, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.families import save, tiny_model
from headway_testing.ranks import assert_shared_alike, computed, computed_by_processes

from headway.engine.layers.group import ALONE

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 152, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", ["MiMoForCausalLM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("LlamaForCausalLM", "Qwen3ForCausalLM"))]
)  # fmt: skip
def test_processes_compute_the_bits_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    folder, meeting = tmp_path / "model", tmp_path / "meeting"
    meeting.mkdir()
    if architecture == "MiMoForCausalLM":
        random_mimo(folder, **SIZES)
    else:
        save(tiny_model(architecture, **SIZES), architecture, folder)
    ranks = computed_by_processes(folder, meeting, size)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = computed(folder, ALONE)
    torch.set_num_threads(num_threads)
    assert_shared_alike(alone, ranks)
