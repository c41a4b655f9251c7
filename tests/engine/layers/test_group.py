"""Ranks that share a model compute what one computes alone, to the last bit."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.ranks import ThreadGroup, assert_shared_alike, computed, run_ranks

from headway.engine.layers.group import ALONE
from headway.engine.protocol.errors import ModelError

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 152, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4}


def assert_threads_share_alike(folder: Path, size: int) -> None:
    ranks = run_ranks(size, lambda group: computed(folder, group))
    assert_shared_alike(computed(folder, ALONE), ranks)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_ranks_compute_the_bits_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    """Four gathers a layer: what each of two products reads, and what it adds."""
    assert_threads_share_alike(save(tiny_model(architecture, **SIZES), architecture, tmp_path), size)


def test_ranks_share_a_tied_output_layer(tmp_path: Path) -> None:
    model = tiny_model("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=True)
    assert_threads_share_alike(save(model, "Qwen2ForCausalLM", tmp_path), 2)


def test_ranks_draft_together(tmp_path: Path) -> None:
    assert_threads_share_alike(random_mimo(tmp_path, **SIZES), 2)


def test_one_rank_gathers_nothing() -> None:
    x = torch.zeros(2, 3)
    assert ALONE.gather(x) is x


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 151}, "151 outputs of lm_head, which 2 ranks cannot share alike"),
        ({"num_key_value_heads": 1}, "1 heads of keys and values, which 2 ranks"),
        ({"intermediate_size": 255}, "255 outputs of feed_forward.gate, which 2 ranks"),
    ],
    ids=str,
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, int], words: str, tmp_path: Path) -> None:
    folder = random_mimo(tmp_path, **{**SIZES, **changes})
    with pytest.raises(ModelError, match=words):
        computed(folder, ThreadGroup(0, [torch.empty(0)] * 2, Barrier(1)))


def test_a_recurrent_layer_is_for_one_rank(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="delta nets are computed by one rank"):
        computed(HybridOracle().save(tmp_path), ThreadGroup(0, [torch.empty(0)] * 2, Barrier(1)))
