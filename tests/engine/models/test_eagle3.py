"""config.json of EAGLE-3 heads as their trainers write it, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from headway_testing.checkpoints import qwen2_config

from headway.engine import ModelError, read_model_spec
from headway.engine.models.eagle3 import Eagle3Spec, read_eagle3_spec
from headway.engine.models.spec import Llama3RopeScaling, ModelSpec, NormSpec

# As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B and SpecForge write it.
ORIGINAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 128256, "draft_vocab_size": 32000,
}  # fmt: skip
# As RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 has it.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "draft_vocab_size": 32000,
    "has_no_defaults_at_init": False, "norm_before_residual": True, "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
    },
    "speculators_version": "0.1.0", "target_hidden_size": None, "tie_word_embeddings": False, "torch_dtype": "float32",
    "transformer_layer_config": {
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "float32", "use_cache": True,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "vocab_size": 128256,
    },
}  # fmt: skip


@pytest.fixture
def target(tmp_path: Path) -> ModelSpec:
    """Of the sizes of Llama 3.1 8B, whichever family it is of."""
    content = qwen2_config(vocab_size=128256, hidden_size=4096, num_hidden_layers=32)
    (tmp_path / "config.json").write_text(json.dumps(content))
    return read_model_spec(tmp_path)


def read(folder: Path, target: ModelSpec, content: object) -> Eagle3Spec:
    (folder / "config.json").write_text(json.dumps(content))
    return read_eagle3_spec(folder, target)


def test_both_layouts_are_read(tmp_path: Path, target: ModelSpec) -> None:
    original = read(tmp_path, target, ORIGINAL)
    assert (original.draft_vocab_size, original.target_hidden_size, original.taps) == (
        32000,
        4096,
        (2, 16, 29),
    )
    assert (original.norms_residual, original.fusion, original.carries) == (False, "plain", "pre_norm")
    (layer,) = original.decoder.layers
    assert (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim) == (32, 8, 128)
    assert (layer.mixer.rope.theta, layer.mixer.rope.scaling) == (10_000.0, None)
    assert original.decoder.norm == NormSpec(1e-5)
    speculators = read(tmp_path, target, SPECULATORS)
    assert speculators.norms_residual
    assert speculators.decoder.layers[0].mixer.rope.scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    assert replace(speculators, decoder=original.decoder, norms_residual=False) == original


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"norm_output": True}, {"carries": "post_norm"}),
        ({"norm_before_fc": True}, {"fusion": "whole_norm"}),
        ({"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False}, {"fusion": "whole_norm"}),
        ({"fc_norm": True, "eagle_config": None}, {"fusion": "part_norms"}),
        ({"norm_before_residual": True}, {"norms_residual": True}),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28, 31]}, {"taps": (1, 15, 28, 31)}),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, {"taps": (1, 15, 28), "other_taps": (2, 16, 29)}),
        ({"eagle_aux_hidden_state_layer_ids": [0, 15, 28]}, {"taps": (1, 16, 29)}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, {"taps": (2, 16, 29), "other_taps": (1, 15, 28)}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 15, 28]}}, {"taps": (1, 16, 29)}),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 31]}}, {"taps": (1, 15, 31)}),
        ({"ptd_token_id": 128255, "mask_token_id": 3}, {"mask_token_id": 128255}),
        ({"draft_vocab_size": None}, {"draft_vocab_size": 128256}),
        ({"hidden_size": 2048, "target_hidden_size": 4096}, {"has_embedding": True, "target_hidden_size": 4096}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_options_are_read_as_their_writers_mean_them(
    changes: dict[str, object], found: dict[str, object], tmp_path: Path, target: ModelSpec
) -> None:
    base, spec = read(tmp_path, target, ORIGINAL), read(tmp_path, target, ORIGINAL | changes)
    assert replace(spec, decoder=base.decoder) == replace(base, **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (ORIGINAL, {"vocab_size": 151936}, "vocab_size is 151,936, the model has 128,256"),
        (ORIGINAL, {"hidden_size": 5120}, r"hidden_size\) is 5,120, the model has 4,096"),
        (ORIGINAL, {"target_hidden_size": 2048}, r"target_hidden_size .* is 2,048, the model has 4,096"),
        (ORIGINAL, {"draft_vocab_size": 200_000}, "draft_vocab_size is 200,000; it must be at most vocab_size, 128,256"),
        (ORIGINAL, {"draft_vocab_size": "all"}, "draft_vocab_size is 'all'; it must be a positive integer"),
        (
            ORIGINAL, {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
            r"layer_ids is \[2, 18, 33\]; the model has 32 layers, so that it must be ascending numbers from 1 to 31",
        ),
        (
            ORIGINAL, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 32]}},
            r"\[1, 15, 32\]; the model has 32 layers, so that it must be ascending numbers from 0 to 30",
        ),
        (ORIGINAL, {"eagle_aux_hidden_state_layer_ids": [16, 2, 29]}, r"\[16, 2, 29\].* ascending"),
        (ORIGINAL, {"eagle_aux_hidden_state_layer_ids": "last"}, "'last'; it must be a list of layers"),
        (ORIGINAL, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        (ORIGINAL, {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        (ORIGINAL, {"norm_output": 1}, "norm_output is 1; it must be true or false"),
        (ORIGINAL, {"architectures": ["LlamaForCausalLM"]}, "drafter is LlamaForCausalLM; supported are LlamaForCausalLMEagle3"),
        (ORIGINAL, {"architectures": ["DeepseekV3ForCausalLMEagle3"]}, "drafter is DeepseekV3ForCausalLMEagle3"),
        (ORIGINAL, {"architectures": None}, "the drafter is not named"),
        (ORIGINAL, {"intermediate_size": 0}, "intermediate_size is 0"),
        (SPECULATORS, {"norm_before_residual": None}, "norm_before_residual is missing"),
        (SPECULATORS, {"speculators_model_type": "dflash"}, "'dflash'; supported are 'eagle3' and 'peagle'"),
        (SPECULATORS, {"speculators_model_type": "peagle"}, "mask_token_id is missing"),
        (ORIGINAL, {"ptd_token_id": 128256}, "ptd_token_id is 128256; it must be a token below vocab_size, 128,256"),
        (SPECULATORS, {"transformer_layer_config": None}, "transformer_layer_config is None"),
        (SPECULATORS, {"transformer_layer_config": {"model_type": "mla"}}, "'mla'; supported are llama and qwen3"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_both_values(
    base: dict[str, object], changes: dict[str, object], message: str, tmp_path: Path, target: ModelSpec
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, target, base | changes)


def test_a_folder_that_is_no_drafters_is_named(tmp_path: Path, target: ModelSpec) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_eagle3_spec(tmp_path / "nowhere", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no config\.json"):
        read_eagle3_spec(tmp_path / "empty", target)


def test_taps_that_a_start_sets_go_before_those_of_the_file(tmp_path: Path, target: ModelSpec) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(ORIGINAL | {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]})
    )
    spec = read_eagle3_spec(tmp_path, target, (3, 30))
    assert (spec.taps, spec.other_taps) == ((3, 30), None)
    with pytest.raises(ModelError, match=r"--drafter-taps is 3,32; the model has 32 layers, .* from 1 to 31"):
        read_eagle3_spec(tmp_path, target, (3, 32))


def test_default_layers_of_a_shallow_model_are_refused(tmp_path: Path, target: ModelSpec) -> None:
    shallow = replace(target, layers=target.layers[:3])
    with pytest.raises(ModelError, match=r"means \[2, 1, 0\] for 3 layers; the model has 3 layers"):
        read(tmp_path, shallow, ORIGINAL)
