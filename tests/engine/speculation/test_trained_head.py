"""Heads in folders of their own, as they are trained for models that ship none: every draft is the oracle's,
which is built of transformers' layers, and no draft changes a text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from headway_testing.exactness import Case, assert_depths_change_no_text
from headway_testing.families import save, tiny_model
from headway_testing.inspection import edit, inspect
from headway_testing.local import LocalEngine
from headway_testing.poison import PoisoningRunner
from headway_testing.proposals import (
    DEPTH,
    Proposals,
    drafting_config,
    note_proposals,
    random_prompts,
    text_of,
)
from headway_testing.trained_heads import TrainedHeadOracle

from headway.engine.build import assemble
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ModelError
from headway.engine.protocol.sampling_params import SamplingParams

VOCAB = 151
prompts_of = partial(random_prompts, VOCAB)
config_of = partial(drafting_config, dtype="float32")


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return note_proposals(monkeypatch)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param("LlamaForCausalLM", {"tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("Qwen3ForCausalLM", {}, marks=pytest.mark.slow),
        ("Qwen3_5ForCausalLM", {}),
        pytest.param("Gemma3ForCausalLM", {}, marks=pytest.mark.slow),
        pytest.param("MistralForCausalLM", {}, marks=pytest.mark.slow),
    ],
    ids=["llama-tied", "qwen3", "hybrid", "gemma3", "windows"],
)
def test_every_draft_is_the_oracles(
    architecture: str, changes: dict[str, object], proposals: Proposals, tmp_path: Path
) -> None:
    """Across chunks of prompts, prefix hits, rejected and accepted drafts, and spells of every depth."""
    target = tiny_model(architecture, **changes)
    save(target, architecture, tmp_path / "model")
    oracle = TrainedHeadOracle(target)
    drafter = oracle.save(tmp_path / "drafter")
    rates = (0.8, 0.7, 0.6, 0.5)
    engine = LocalEngine(config_of(tmp_path / "model", drafter, synthetic_acceptance=rates, prefill_chunk=64))
    engine.loop._runner = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    texts = text_of(engine, prompts_of(1, 2, 17, 75), 70)
    texts += text_of(engine, [texts[3][: len(texts[3]) - 20]], 30)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens >= 64
    assert {len(drafts) for _, _, drafts in proposals} >= {1, 2, DEPTH}
    assert len(proposals) > 60
    for seed, length, drafts in proposals:
        num_valid = min(len(drafts), len(texts[seed]) - 1 - length)
        wanted = oracle.drafts(torch.tensor(texts[seed][: length + 1]), num_valid)
        assert drafts[:num_valid] == wanted, (seed, length)


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.slow) for name in ("Qwen3", "Qwen3_5", "Gemma3"))],
)  # fmt: skip
def test_no_depth_changes_a_text_alone_or_in_a_crowd(architecture: str, tmp_path: Path) -> None:
    target = tiny_model(architecture)
    save(target, architecture, tmp_path / "model")
    drafter = TrainedHeadOracle(target).save(tmp_path / "drafter")
    kinds: tuple[dict[str, object], ...] = (
        {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3},
    )  # fmt: skip
    cases = [
        Case(tuple(prompt), 18, SamplingParams(seed=seed, **kinds[seed]))  # type: ignore[arg-type]
        for seed, prompt in enumerate(prompts_of(1, 16, 33, 90))
    ]
    config = config_of(tmp_path / "model", drafter, dtype="float64", max_running=3)
    assert_depths_change_no_text(cases, config, (1, 3, DEPTH))


@pytest.mark.parametrize("changes", [{}, {"load_format": "dummy"}], ids=str)
def test_an_engine_reports_what_the_inspection_said(changes: dict[str, object], tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    options = {"drafter_path": str(TrainedHeadOracle(target).save(tmp_path / "drafter")), **changes}
    config = EngineConfig(model_path=str(tmp_path / "model"), device="cpu", **options)  # type: ignore[arg-type]
    engine = assemble(config, progress=lambda _: None)
    assert engine.info.drafter == "trained_head"
    assert inspect(tmp_path / "model", **options).engine == engine.info


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", 160, "vocab_size is 160, for this model it must be 151"),
        ("hidden_size", 64, "hidden_size is 64, for this model it must be 48"),
        ("target_layer", 1, "target_layer is 1, for this model it must be 2"),
        ("draft_vocab_size", 152, "draft_vocab_size is 152; it must be a number of the model's 151 tokens"),
        ("draft_vocab_size", 90, r"lm_head.weight is \[100, 48\], not \[90, 48\]"),
    ],
)
def test_a_head_of_another_model_is_refused(key: str, value: int, message: str, tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM")
    save(target, "LlamaForCausalLM", tmp_path / "model")
    drafter = TrainedHeadOracle(target).save(tmp_path / "drafter")
    content = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(ModelError, match=message):
        assemble(config_of(tmp_path / "model", drafter), progress=lambda _: None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.mlp.up_proj.weight", r"lacks 1 tensors: layers\.0\.mlp\.up_proj\.weight"),
        ("d2t", "lacks d2t, which gives the model's ids of its 100 draft tokens"),
    ],
)
def test_a_head_lacks_no_tensor(name: str, message: str, tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM", tie_word_embeddings=True)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    drafter = TrainedHeadOracle(target).save(tmp_path / "drafter")
    edit(drafter, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=message):
        assemble(config_of(tmp_path / "model", drafter), progress=lambda _: None)


def test_models_of_experts_alone_are_refused(tmp_path: Path) -> None:
    target = tiny_model("LlamaForCausalLM")
    drafter = TrainedHeadOracle(target).save(tmp_path / "drafter")
    save(tiny_model("MixtralForCausalLM"), "MixtralForCausalLM", tmp_path / "experts")
    with pytest.raises(ModelError, match="no layer of MixtralForCausalLM has attention and a feed-forward"):
        assemble(config_of(tmp_path / "experts", drafter), progress=lambda _: None)
