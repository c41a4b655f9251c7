"""Ranks that share a model compute what one computes alone, to the last bit."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.families import CLASSES, save, tiny_model
from headway_testing.ranks import (
    SIZES,
    ThreadGroup,
    assert_shared_alike,
    computed,
    run_ranks,
    shareable_folder,
)

from headway.engine.layers.group import ALONE
from headway.engine.protocol.errors import ModelError


def assert_threads_share_alike(folder: Path, size: int) -> None:
    ranks = run_ranks(size, lambda group: computed(folder, group))
    assert_shared_alike(computed(folder, ALONE), ranks)


# Dense, with an MTP head, with delta nets, with experts.
FAMILIES = ("Qwen3ForCausalLM", "MiMoForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(CLASSES.keys() - set(FAMILIES))]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHERS])
def test_ranks_compute_the_bits_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    """Four gathers a layer: what each of two products reads, and what it adds."""
    assert_threads_share_alike(shareable_folder(tmp_path, architecture), size)


def test_ranks_share_a_tied_output_layer(tmp_path: Path) -> None:
    model = tiny_model("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=True)
    assert_threads_share_alike(save(model, "Qwen2ForCausalLM", tmp_path), 2)


def test_one_rank_gathers_nothing() -> None:
    x = torch.zeros(2, 3)
    assert ALONE.gather(x) is x


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 151}, "151 outputs of lm_head, which 2 ranks cannot share alike"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "3 heads of keys and values, which 2 ranks"),
        ({"intermediate_size": 255}, "255 outputs of feed_forward.gate, which 2 ranks"),
    ],
    ids=str,
)
def test_what_ranks_cannot_share_is_refused(changes: dict[str, int], words: str, tmp_path: Path) -> None:
    folder = random_mimo(tmp_path, **{**SIZES, **changes})
    with pytest.raises(ModelError, match=words):
        computed(folder, ThreadGroup(0, [torch.empty(0)] * 2, Barrier(1)))
