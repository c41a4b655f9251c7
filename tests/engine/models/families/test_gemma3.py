"""Gemma 3, text alone and as the text part of a model that sees images, and Gemma 2, against transformers'
classes."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import TINY
from headway_testing.families import OWN, ROPES, assert_logits_of_transformers, save, tiny_model
from headway_testing.oracle import randomise
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from headway.engine import ModelError, read_model_spec
from headway.engine.loading import headers
from headway.engine.models.spec import LinearRopeScaling

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"


def by_type(rope: dict[str, object]) -> dict[str, object]:
    """transformers reads `truncate` outside the object for a type of layer."""
    full = {key: value for key, value in rope.items() if key != "truncate"}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": 5e3}}}


BOTH: dict[str, dict[str, object]] = {
    "as it is": {},
    "ungrouped": {"num_key_value_heads": 6},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True},
    "silu": {"hidden_activation": "silu"},
    "all layers slide": {"layer_types": ["sliding_attention"] * 3},
    "no layer slides": {"layer_types": ["full_attention"] * 3},
    **{f"window {size}": {"sliding_window": size} for size in (1, 15, 16, 17, 74, 75, 200)},
}
VARIANTS: list[tuple[str, dict[str, object], str]] = [
    *((GEMMA2, changes, f"gemma2 {name}") for name, changes in BOTH.items()),
    (GEMMA2, {"attn_logit_softcapping": None}, "gemma2 no cap of scores"),
    (GEMMA2, {"final_logit_softcapping": None}, "gemma2 no cap of logits"),
    *((GEMMA3, changes, f"gemma3 {name}") for name, changes in BOTH.items()),
    (GEMMA3, {"final_logit_softcapping": 6.0}, "gemma3 cap of logits"),
    (GEMMA3, {"rope_parameters": None}, "gemma3 default positions"),
    (GEMMA3, {"sliding_window_pattern": 2}, "gemma3 every other layer"),
    *((GEMMA3, by_type(rope), f"gemma3 rope {name}") for name, rope in ROPES.items()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "changes"), [case[:2] for case in VARIANTS], ids=[case[2] for case in VARIANTS]
)
def test_logits_are_those_of_transformers(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    theirs = tiny_model(architecture, **changes)
    assert_logits_of_transformers(theirs, save(theirs, architecture, tmp_path))


def test_the_text_part_of_a_model_that_sees_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the tensors' names and the nested config.json that transformers saves."""
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )  # fmt: skip
    config = Gemma3Config(
        text_config={**TINY, **OWN[GEMMA3]},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=150,
    )
    theirs = Gemma3ForConditionalGeneration(config).eval()
    randomise(theirs, torch.Generator().manual_seed(0))
    theirs.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger=headers.__name__):
        assert_logits_of_transformers(theirs, tmp_path)
    assert "vision tensors (vision_tower.*, multi_modal_projector.*) are skipped" in caplog.text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention is true", "earlier ones"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0", "null"]),
        ({"final_logit_softcapping": -1.0}, ["final_logit_softcapping is -1.0", "above 0"]),
        ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar is 0", "positive integer"]),
        ({"sliding_window": None}, ["sliding_window is null", "positive integer"]),
        ({"hidden_activation": "gelu"}, ["hidden_activation is 'gelu'", "'gelu_pytorch_tanh'"]),
        ({"hidden_size": 47}, ["hidden_size 47", "num_attention_heads 6"]),
        ({"rope_parameters": {"rope_theta": 1e4}}, ["rope_parameters is {'rope_theta'", "full_attention"]),
        ({"rope_local_base_freq": 0, "rope_parameters": None}, ["rope_local_base_freq is 0", "positive"]),
        ({"layer_types": ["linear_attention"] * 3}, ["'linear_attention'", "sliding_attention"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_refused_config_names_key_and_value(
    changes: dict[str, object], parts: list[str], tmp_path: Path
) -> None:
    content = {**TINY, **OWN[GEMMA3], "architectures": [GEMMA3], "model_type": "gemma3_text", **changes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as caught:
        read_model_spec(tmp_path)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_older_spellings_of_positions_are_read(tmp_path: Path) -> None:
    """As the published models have them."""
    content = {**TINY, **OWN[GEMMA3], "architectures": [GEMMA3], "rope_parameters": None}
    content |= {
        "rope_theta": 2e6,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    ropes = {(kind.rope.theta, kind.rope.scaling) for kind in read_model_spec(tmp_path).attentions}
    assert ropes == {(2e4, None), (2e6, LinearRopeScaling(8.0))}
