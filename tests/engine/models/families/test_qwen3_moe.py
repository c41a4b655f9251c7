"""Qwen3 with experts, and Mixtral, against transformers' classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headway_testing.families import ROPES, assert_logits_of_transformers, save, tiny_model

from headway.engine import ModelError, read_model_spec

QWEN, MIXTRAL = "Qwen3MoeForCausalLM", "MixtralForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "normalised": {"norm_topk_prob": True},
    "ungrouped": {"num_key_value_heads": 6},
    "tied": {"tie_word_embeddings": True},
    "windows": {"use_sliding_window": True, "sliding_window": 20},
    "biased": {"attention_bias": True},
    "every second layer is dense": {"decoder_sparse_step": 2},
    "two dense layers": {"mlp_only_layers": [0, 2]},
    "approximated GELU": {"hidden_act": "gelu_pytorch_tanh"},
    "rope yarn": {"rope_parameters": ROPES["yarn"]},
}
MIXTRAL_VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "head_dim of hidden_size": {"head_dim": None},
    "one expert is met": {"num_experts_per_tok": 1},
    "windows": {"sliding_window": 20},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(QWEN, **changes)
    assert_logits_of_transformers(theirs, save(theirs, QWEN, tmp_path))


@pytest.mark.parametrize("changes", MIXTRAL_VARIANTS.values(), ids=MIXTRAL_VARIANTS)
def test_logits_of_mixtral_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(MIXTRAL, **changes)
    assert_logits_of_transformers(theirs, save(theirs, MIXTRAL, tmp_path))


def test_both_spellings_of_the_number_of_experts_are_read_and_must_agree(tmp_path: Path) -> None:
    """The published config.json has num_experts, the one that transformers writes num_local_experts."""
    folder = save(tiny_model(QWEN), QWEN, tmp_path)
    file = folder / "config.json"
    content = json.loads(file.read_text())
    assert content["num_local_experts"] == 7
    written = read_model_spec(folder)
    file.write_text(
        json.dumps({k: v for k, v in content.items() if k != "num_local_experts"} | {"num_experts": 7})
    )
    assert read_model_spec(folder) == written
    file.write_text(json.dumps(content | {"num_experts": 8}))
    with pytest.raises(ModelError, match="num_experts is 8, num_local_experts 7; give one of them"):
        read_model_spec(folder)


def test_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    content = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"the architecture is GptOssForCausalLM; supported are .*Qwen3Moe"):
        read_model_spec(tmp_path)
