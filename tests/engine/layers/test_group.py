"""Ranks that share a model compute what one computes alone, to the last bit."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.paged import PagedSequences
from headway_testing.ranks import ThreadGroup, run_ranks

from headway.engine.layers.group import ALONE, Group
from headway.engine.loading.checkpoint import load_model
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.errors import ModelError
from headway.engine.speculation.select import announced_head

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 152, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4}


class Computed(NamedTuple):
    """Hidden states and logits of two prompts and of a window after each, the keys of the first layer,
    and, where there is a head, a draft's carries and logits."""

    hidden: torch.Tensor
    logits: torch.Tensor
    keys: torch.Tensor
    carries: torch.Tensor | None
    draft_logits: torch.Tensor | None


def computed(folder: Path, group: Group) -> Computed:
    with torch.inference_mode():
        make_draft = announced_head(read_model_spec(folder))
        models = load_model(
            folder, device=torch.device("cpu"), dtype="float32", make_draft=make_draft, progress=lambda _: None, group=group
        )  # fmt: skip
        model, head = models.target, models.draft
        sequences = PagedSequences(models, 2, 64)
        tokens = torch.randint(0, 152, (51,), generator=torch.Generator().manual_seed(3))
        first = sequences.forward([(0, 0, 30), (1, 0, 13)], tokens[:43])
        second = sequences.forward([(0, 30, 4), (1, 13, 4)], tokens[43:])
        if isinstance(group, ThreadGroup):
            assert group.num_gathers == 2 * 4 * len(model.layers)
        hidden = torch.cat([first, second])
        logits, keys = model.logits(hidden), sequences.pool.layer(0)["keys"]
        if head is None:
            return Computed(hidden, logits, keys, None, None)
        carries = sequences.draft([(0, 1, 29), (1, 1, 12)], tokens[:41], first[:41])
        return Computed(hidden, logits, keys, carries, head.logits(carries))


def assert_shared_alike(folder: Path, size: int) -> None:
    """Every rank has the results of a model that is computed alone, and its share of the keys."""
    alone, ranks = computed(folder, ALONE), run_ranks(size, lambda group: computed(folder, group))
    for rank in ranks:
        whole = rank._replace(keys=torch.cat([each.keys for each in ranks], dim=2))
        for name, found, wanted in zip(Computed._fields, whole, alone, strict=True):
            assert found is wanted is None or torch.equal(found, wanted), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_ranks_compute_the_bits_of_one(architecture: str, size: int, tmp_path: Path) -> None:
    """Four gathers a layer: what each of two products reads, and what it adds."""
    assert_shared_alike(save(tiny_model(architecture, **SIZES), architecture, tmp_path), size)


def test_ranks_share_a_tied_output_layer(tmp_path: Path) -> None:
    model = tiny_model("Qwen2ForCausalLM", **SIZES, tie_word_embeddings=True)
    assert_shared_alike(save(model, "Qwen2ForCausalLM", tmp_path), 2)


def test_ranks_draft_together(tmp_path: Path) -> None:
    assert_shared_alike(random_mimo(tmp_path, **SIZES), 2)


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
