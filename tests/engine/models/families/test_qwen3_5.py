"""Qwen3.5, text alone and as the text part of a model that sees images, against transformers' classes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from headway_testing.drafting import draft_chain, prefill
from headway_testing.families import ROPES, assert_logits_of_transformers, save, tiny_model
from headway_testing.hybrid import HybridOracle
from headway_testing.paged import PagedSequences, load, load_pair

from headway.engine import ModelError, read_model_spec
from headway.engine.layers.causal_lm import TargetStates
from headway.engine.loading import headers
from headway.engine.models.spec import AttentionSpec, ModelSpec, MtpSpec

ARCHITECTURE = "Qwen3_5ForCausalLM"
VARIANTS: dict[str, dict[str, object]] = {
    "grouped": {},
    "ungrouped": {"num_key_value_heads": 6, "linear_num_value_heads": 2},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "large epsilon": {"rms_norm_eps": 1e-2},
    "two taps": {"linear_conv_kernel_dim": 2},
    "layers by interval": {"layer_types": None},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
    "half of each head turns": {"rope_parameters": {**ROPES["default"], "partial_rotary_factor": 0.5}},
}
TOLERANCE, FAR_OFF = 1e-4, 1e-2


@pytest.fixture
def tokens() -> torch.Tensor:
    """[75] int64: a piece of 64 and a part."""
    return torch.randint(0, 151, (75,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_transformers(changes: dict[str, object], tmp_path: Path) -> None:
    theirs = tiny_model(ARCHITECTURE, **changes)
    if "tie_word_embeddings" in changes:  # logits of about 5, as without
        theirs.model.embed_tokens.weight.data.mul_(0.2)
    assert_logits_of_transformers(theirs, save(theirs, ARCHITECTURE, tmp_path))


@pytest.mark.parametrize("widths", [[74], [64, 10], [1, 30, 43]], ids=["whole", "grid", "uneven"])
@pytest.mark.parametrize("sees_images", [False, True], ids=["text", "text-and-images"])
def test_drafts_of_every_depth_are_those_of_the_oracle(
    sees_images: bool, widths: list[int], tokens: torch.Tensor, tmp_path: Path
) -> None:
    oracle = HybridOracle()
    models = load_pair(oracle.save(tmp_path, sees_images=sees_images), dtype="float32")
    sequences = prefill(models, tokens[:-1], widths)
    chain = draft_chain(sequences, tokens[-1:], oracle.hidden(tokens[:-1])[-1:], len(tokens) - 1, 4)
    wanted = oracle.draft_chain(tokens, 4)
    assert chain.argmax(-1).tolist() == wanted.argmax(-1).tolist()
    assert (chain - wanted).abs().max() < TOLERANCE


def test_the_head_reads_what_the_final_norm_gives(tokens: torch.Tensor, tmp_path: Path) -> None:
    oracle = HybridOracle()
    models = load_pair(oracle.save(tmp_path), dtype="float32")
    hidden = PagedSequences(models, 1, len(tokens)).forward([(0, 0, len(tokens))], tokens)
    assert (models.draft.draft_hidden(TargetStates(hidden)) - oracle.hidden(tokens)).abs().max() < TOLERANCE


def turned(spec: ModelSpec, change: dict[str, Any]) -> ModelSpec:
    """Returns the spec with a change of every layer of attention, those of the head too."""
    layers = tuple(
        replace(layer, mixer=replace(layer.mixer, **change))
        if isinstance(layer.mixer, AttentionSpec)
        else layer
        for layer in spec.layers
    )
    assert spec.draft_head is not None
    of_head = replace(spec.draft_head.layer, mixer=replace(spec.draft_head.layer.mixer, **change))
    return replace(spec, layers=layers, draft_head=replace(spec.draft_head, layer=of_head))


def with_head(spec: ModelSpec, **change: Any) -> ModelSpec:
    assert isinstance(spec.draft_head, MtpSpec)
    return replace(spec, draft_head=replace(spec.draft_head, **change))


TARGET_SWITCHES = {
    "norms multiply by the weight": lambda spec: replace(spec, norm=replace(spec.norm, unit_offset=False)),
    "whole heads turn": lambda spec: turned(spec, {"rope": replace(spec.attentions[0].rope, rotary_dim=16)}),
    "head norms multiply by the weight": lambda spec: turned(
        spec, {"qk_norm": replace(spec.norm, unit_offset=False)}
    ),
}
HEAD_SWITCHES = {
    "the hidden state comes first": lambda spec: with_head(spec, first="hidden"),
    "the head reads before the norm": lambda spec: with_head(spec, reads="pre_norm"),
    "the head carries before the norm": lambda spec: with_head(spec, carries="pre_norm"),
}


@pytest.mark.parametrize("switch", TARGET_SWITCHES.values(), ids=TARGET_SWITCHES)
def test_a_switch_of_the_target_turned_the_wrong_way_is_far_off(
    switch: Any, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = HybridOracle()
    monkeypatch.setattr(headers, "read_model_spec", lambda folder: switch(read_model_spec(folder)))
    model = load(oracle.save(tmp_path), dtype="float32")
    logits = model.logits(PagedSequences(model, 1, len(tokens)).forward([(0, 0, len(tokens))], tokens))
    assert (logits - oracle.logits(tokens)).abs().max() > FAR_OFF


@pytest.mark.parametrize("name", ["none", *HEAD_SWITCHES])
def test_a_switch_of_the_head_turned_the_wrong_way_is_far_off(
    name: str, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is carried on shows at the second draft only."""
    oracle, switch = HybridOracle(), HEAD_SWITCHES.get(name, lambda spec: spec)
    monkeypatch.setattr(headers, "read_model_spec", lambda folder: switch(read_model_spec(folder)))
    models = load_pair(oracle.save(tmp_path), dtype="float32")
    last = PagedSequences(models, 1, 74).forward([(0, 0, 74)], tokens[:-1])[-1:]
    state = models.draft.draft_hidden(TargetStates(last))
    chain = draft_chain(prefill(models, tokens[:-1], [74]), tokens[-1:], state, 74, 2)
    difference = (chain - oracle.draft_chain(tokens, 2)).abs().max()
    assert difference < TOLERANCE if name == "none" else difference > FAR_OFF


def test_vision_tensors_are_skipped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = HybridOracle().save(tmp_path, sees_images=True)
    with caplog.at_level(logging.INFO):
        model = load(folder)
    lines = [record.getMessage() for record in caplog.records if "vision" in record.getMessage()]
    assert len(lines) == 1
    assert "21 vision tensors (model.visual.*)" in lines[0]
    assert model.spec.architecture == "Qwen3_5ForConditionalGeneration"


def test_a_checkpoint_without_its_head_is_served_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_pair(HybridOracle().save(tmp_path, with_head=False)).draft is None
    assert "announces a draft head of 1 layers, the weights have none" in caplog.text


def test_what_ties_the_embedding_may_stand_outside(tmp_path: Path) -> None:
    folder = HybridOracle(tie_word_embeddings=True).save(tmp_path, sees_images=True)
    content = json.loads((folder / "config.json").read_text())
    del content["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(content))
    assert read_model_spec(folder).tied
    assert load(folder).spec.tied


@pytest.mark.parametrize("sees_images", [False, True], ids=["text", "text-and-images"])
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            ["quantized", "modelopt, NVFP4", "an FP8 or a 4-bit integer checkpoint"],
        ),
        ({"layer_types": ["linear_attention"] * 4}, ["no layer is of type 'full_attention'"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["'sliding_attention'", "linear_attention"]),
        ({"linear_num_value_heads": 3}, ["linear_num_value_heads 3", "linear_num_key_heads 2"]),
        ({"linear_conv_kernel_dim": 1}, ["linear_conv_kernel_dim is 1", "2 or more"]),
        ({"mtp_num_hidden_layers": 2}, ["mtp_num_hidden_layers is 2", "0 and 1"]),
        ({"mtp_use_dedicated_embeddings": True}, ["mtp_use_dedicated_embeddings"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            ["partial_rotary_factor is 0.2", "heads of 16"],
        ),
        ({"full_attention_interval": 0}, ["full_attention_interval is 0"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_refused_config_names_key_and_value(
    changes: dict[str, object], parts: list[str], sees_images: bool, tmp_path: Path
) -> None:
    folder = HybridOracle().save(tmp_path, sees_images=sees_images)
    content = json.loads((folder / "config.json").read_text())
    content.get("text_config", content).update(changes)
    if "quantization_config" in changes and sees_images:
        content["quantization_config"] = content["text_config"].pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(ModelError) as caught:
        read_model_spec(folder)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_text_config_is_needed_and_of_the_right_kind(tmp_path: Path) -> None:
    folder = HybridOracle().save(tmp_path, sees_images=True)
    content = json.loads((folder / "config.json").read_text())
    for text, part in ((None, "text_config is None"), ({"model_type": "qwen3"}, "'qwen3'")):
        (folder / "config.json").write_text(json.dumps(content | {"text_config": text}))
        with pytest.raises(ModelError, match=part):
            read_model_spec(folder)
