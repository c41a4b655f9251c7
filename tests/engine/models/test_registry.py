"""config.json as the families write it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headway_testing.checkpoints import mimo_config, qwen2_config
from headway_testing.families import CLASSES

from headway.engine import ModelError, ModelSpec, read_model_spec
from headway.engine.models.registry import FAMILY_OF
from headway.engine.models.spec import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
)


def read(folder: Path, content: object) -> ModelSpec:
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return read_model_spec(folder)


@pytest.mark.parametrize("architecture", FAMILY_OF)
def test_a_family_runs_in_the_suites_of_all_or_has_tests_of_its_own(architecture: str) -> None:
    own = Path(__file__).parent / "families" / f"test_{FAMILY_OF[architecture].model_type}.py"
    assert architecture in CLASSES or own.exists()


def test_all_numbers_are_read(tmp_path: Path) -> None:
    layer = LayerSpec(
        AttentionSpec(6, 2, 16, RopeSpec(640_000.0, 16), scale=0.25, has_qkv_bias=True), DenseSpec(72)
    )
    assert read(tmp_path, mimo_config(rope_theta=640_000, rms_norm_eps=1e-5)) == ModelSpec(
        architecture="MiMoForCausalLM",
        vocab_size=151,
        hidden_size=48,
        layers=(layer,) * 3,
        norm=NormSpec(1e-5),
        max_position_embeddings=256,
        tied=False,
        draft_head=MtpSpec(1, layer, first="hidden", reads="pre_norm", carries="post_norm"),
        named_dtype="float32",
    )


def test_what_is_not_said_follows_from_what_is(tmp_path: Path) -> None:
    config = qwen2_config(num_attention_heads=4, num_key_value_heads=None)
    for key in ("head_dim", "tie_word_embeddings", "num_nextn_predict_layers"):
        del config[key]
    parsed = read(tmp_path, config)
    attention = parsed.attentions[0]
    assert (attention.head_dim, attention.num_kv_heads, parsed.draft_head) == (12, 4, None)
    assert parsed.tied is False


def test_rope_theta_is_also_found_in_rope_parameters(tmp_path: Path) -> None:
    config = qwen2_config(rope_parameters={"rope_type": "default", "rope_theta": 5_000.0})
    del config["rope_theta"]
    assert read(tmp_path, config).attentions[0].rope.theta == 5_000.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, 1e6),
        (
            {"rope_scaling": {"type": "default", "rope_theta": 1e5}, "rope_parameters": {"rope_theta": 1e6}},
            1e5,
        ),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, 1e6),
    ],
    ids=["inner-before-outer", "scaling-before-parameters", "outer-where-inner-is-silent"],
)
def test_of_two_spellings_of_rope_theta_transformers_choice_counts(
    changes: dict[str, object], expected: float, tmp_path: Path
) -> None:
    assert read(tmp_path, qwen2_config(**changes)).attentions[0].rope.theta == expected


def test_keys_that_are_left_out_have_the_config_classs_defaults(tmp_path: Path) -> None:
    config = qwen2_config()
    del config["rope_theta"], config["rms_norm_eps"]
    parsed = read(tmp_path, config)
    assert (parsed.attentions[0].rope.theta, parsed.norm.epsilon) == (10_000.0, 1e-6)


def test_layers_from_max_window_layers_on_slide(tmp_path: Path) -> None:
    config = qwen2_config(use_sliding_window=True, sliding_window=64, max_window_layers=2)
    assert [kind.sliding_window for kind in read(tmp_path, config).attentions] == [None, None, 64]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 64},
        {"use_sliding_window": False, "sliding_window": 0},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 3},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": None},
        {"hidden_act": "swish"},
    ],
    ids=[
        "window-off",
        "window-of-0-off",
        "no-window",
        "no-layer-slides",
        "no-type-slides",
        "default-rope",
        "null-rope",
        "swish",
    ],
)
def test_settings_without_effect_are_accepted(changes: dict[str, object], tmp_path: Path) -> None:
    assert len(read(tmp_path, qwen2_config(**changes)).layers) == 3


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["GemmaForCausalLM", *FAMILY_OF]),
        ({"architectures": None}, ["not named", *FAMILY_OF]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'", "positive integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "missing"]),
        ({"rope_theta": None}, ["rope_theta", "missing"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, ["'dynamic'", "'default'", "'yarn'"]),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, ["'longrope'", "'default'"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "'linear'", "missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5", "from 1"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor", "0.5"],
        ),
        ({"rope_scaling": {"type": "yarn"}}, ["factor", "'yarn'", "missing"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, ["truncate is 1"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "rope_theta": 1}}, ["rope_theta is 1", "YaRN"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["low_freq_factor", "missing"]),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            ["high_freq_factor is 1", "low_freq_factor 4"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'", "'gelu_pytorch_tanh'"]),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["quantized", "bitsandbytes", "an FP8, GPTQ or AWQ checkpoint"],
        ),
        ({"num_nextn_predict_layers": 17}, ["num_nextn_predict_layers is 17", "0 to 16"]),
        ({"num_nextn_predict_layers": -1}, ["num_nextn_predict_layers is -1", "0 to 16"]),
        ({"num_key_value_heads": 4}, ["num_attention_heads 6", "num_key_value_heads 4"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_refused_config_names_file_key_and_value(
    changes: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, mimo_config(**changes))
    assert [part for part in (str(tmp_path / "config.json"), *parts) if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "part"),
    [("{", "not valid JSON"), ("[1]", "holds a list"), ("\x00", "not valid JSON")],
    ids=["cut-off", "list", "binary"],
)
def test_a_file_that_is_no_json_object_is_named(content: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=part):
        read(tmp_path, content)


def test_a_missing_folder_and_a_missing_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"folder .*nowhere does not exist"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_model_spec(tmp_path)
