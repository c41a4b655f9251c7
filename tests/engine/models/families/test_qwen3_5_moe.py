"""Qwen3.5 with experts and Qwen3-Next, whose experts may be packed or stored one by one, against
transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from headway_testing.drafting import draft_chain, prefill
from headway_testing.families import assert_logits_of_transformers, save, tiny_model
from headway_testing.hybrid import HybridOracle, one_by_one, packed, rewrite
from headway_testing.paged import load_pair

from headway.engine import ModelError, read_model_spec
from headway.engine.models.spec import DenseSpec, ExpertsSpec

ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "one head of values for each of keys": {"linear_num_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "every expert is met": {"num_experts_per_tok": 7},
    "one expert is met": {"num_experts_per_tok": 1},
}
NEXT_VARIANTS: dict[str, dict[str, object]] = {
    "scores are not normalised": {"norm_topk_prob": False},
    "a dense layer": {"mlp_only_layers": [1]},
    "every second layer is dense": {"decoder_sparse_step": 2},
}
TOLERANCE = 1e-4


@pytest.fixture
def tokens() -> torch.Tensor:
    """[75] int64: a piece of 64 and a part."""
    return torch.randint(0, 151, (75,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((architecture, changes) for architecture in ARCHITECTURES for changes in VARIANTS.values()),
        *(("Qwen3NextForCausalLM", changes) for changes in NEXT_VARIANTS.values()),
    ],
    ids=[*(f"{a}-{name}" for a in ARCHITECTURES for name in VARIANTS), *NEXT_VARIANTS],
)
def test_logits_are_those_of_transformers(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    theirs = tiny_model(architecture, **changes)
    if "tie_word_embeddings" in changes:  # logits of about 5, as without
        theirs.model.embed_tokens.weight.data.mul_(0.2)
    assert_logits_of_transformers(theirs, save(theirs, architecture, tmp_path))


@pytest.mark.parametrize("widths", [[74], [1, 30, 43]], ids=["whole", "uneven"])
@pytest.mark.parametrize("layout", ["mixed", "packed", "one by one"])
@pytest.mark.parametrize(
    ("architecture", "sees_images"),
    [("Qwen3_5MoeForCausalLM", False), ("Qwen3_5MoeForCausalLM", True), ("Qwen3NextForCausalLM", False)],
    ids=["text", "text-and-images", "next"],
)
def test_drafts_of_every_depth_are_those_of_the_oracle(
    architecture: str, sees_images: bool, layout: str, widths: list[int], tokens: torch.Tensor, tmp_path: Path
) -> None:
    """As it is saved, the trunk has its experts one by one and the head has them packed."""
    oracle = HybridOracle(architecture=architecture)
    folder = oracle.save(tmp_path, sees_images=sees_images)
    if layout != "mixed":
        rewrite(folder, packed if layout == "packed" else one_by_one)
    models = load_pair(folder, dtype="float32")
    sequences = prefill(models, tokens[:-1], widths)
    chain = draft_chain(sequences, tokens[-1:], oracle.hidden(tokens[:-1])[-1:], len(tokens) - 1, 4)
    wanted = oracle.draft_chain(tokens, 4)
    assert chain.argmax(-1).tolist() == wanted.argmax(-1).tolist()
    assert (chain - wanted).abs().max() < TOLERANCE


def test_layers_that_config_json_names_are_dense(tmp_path: Path) -> None:
    theirs = tiny_model("Qwen3NextForCausalLM", mlp_only_layers=[0], decoder_sparse_step=2)
    spec = read_model_spec(save(theirs, "Qwen3NextForCausalLM", tmp_path))
    kinds = [type(layer.feed_forward) for layer in spec.layers]
    assert kinds == [DenseSpec, ExpertsSpec, DenseSpec, ExpertsSpec]


def test_a_checkpoint_of_qwen3_next_without_its_head_is_served_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = HybridOracle(architecture="Qwen3NextForCausalLM").save(tmp_path, with_head=False)
    content = json.loads((folder / "config.json").read_text())
    del content["mtp_num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(content))
    assert read_model_spec(folder).draft_head is not None
    assert load_pair(folder).draft is None
    assert "a draft head of 1 layers, the weights have none" in caplog.text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"shared_expert_intermediate_size": 32},
            ["shared_expert_intermediate_size is 32", "moe_intermediate_size 24"],
        ),
        ({"num_experts_per_tok": 8}, ["num_experts_per_tok is 8", "the number of experts, 7"]),
        ({"num_experts": 0}, ["num_experts is 0", "positive integer"]),
        ({"hidden_act": "gelu_pytorch_tanh"}, ["hidden_act is 'gelu_pytorch_tanh'", "'silu'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_refused_config_names_key_and_value(
    architecture: str, changes: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    folder = HybridOracle(architecture=architecture).save(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    with pytest.raises(ModelError) as caught:
        read_model_spec(folder)
    assert [part for part in parts if part not in str(caught.value)] == []
