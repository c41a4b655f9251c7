"""Draft models: every draft is what transformers' model says next; a model that drafts for itself is always
right; and no draft changes a text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from headway_testing.eagle import widen_norms
from headway_testing.exactness import Case, assert_depths_change_no_text
from headway_testing.families import save, tiny_model
from headway_testing.local import LocalEngine
from headway_testing.padded import PaddedLaunches
from headway_testing.poison import PoisoningRunner
from headway_testing.proposals import (
    DEPTH,
    Proposals,
    drafting_config,
    note_proposals,
    random_prompts,
    text_of,
)

from headway.engine.build import assemble
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.layers.draft_lm import DraftLM
from headway.engine.protocol.errors import ModelError
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.draft_model import ModelDrafter

VOCAB = 151
prompts_of = partial(random_prompts, VOCAB)


def folder_of(architecture: str, folder: Path, **changes: object) -> Path:
    return save(tiny_model(architecture, **changes), architecture, folder)


@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [("Qwen3ForCausalLM", "LlamaForCausalLM"), ("Qwen3_5ForCausalLM", "Qwen3ForCausalLM")],
    ids=["dense", "hybrid-target"],
)
def test_every_draft_is_what_the_draft_model_says_next(
    target: str, draft: str, is_padded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Across chunks of prompts, prefix hits, rejected and accepted drafts, and spells of every depth."""
    proposals: Proposals = note_proposals(monkeypatch, ModelDrafter)
    theirs = tiny_model(draft, seed=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    config = drafting_config(
        folder_of(target, tmp_path / "model"), save(theirs, draft, tmp_path / "draft"),
        prefill_chunk=64, synthetic_acceptance=(0.8, 0.7, 0.6, 0.5),
    )  # fmt: skip
    engine = LocalEngine(config)
    engine.loop._runner = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    if is_padded:
        grid = StepGrid(row_counts(4), prompt_counts=(16, 64), mixed_counts=(16, 64))
        PaddedLaunches(engine.engine.runner, grid)
    texts = text_of(engine, prompts_of(1, 2, 3, 17, 32, 75), 70)
    texts += text_of(engine, [texts[5][: len(texts[5]) - 20]], 40)
    assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens >= 64
    assert {len(drafts) for _, _, drafts in proposals} == {1, 2, 3, DEPTH}
    assert len(proposals) > 80
    theirs.double()
    widen_norms(theirs)
    for seed, length, drafts in proposals:
        tokens = torch.tensor([[*texts[seed][: length + 1], *drafts[:-1]]])
        with torch.no_grad():
            said = theirs(tokens, use_cache=False).logits[0, length:].argmax(-1).tolist()
        num_valid = min(len(drafts), len(texts[seed]) - 1 - length)  # no slot stands at the last token
        assert drafts[:num_valid] == said[:num_valid], (seed, length)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"])
def test_a_model_that_drafts_for_itself_is_always_right(architecture: str, tmp_path: Path) -> None:
    """Sampled, with penalties and bias, too: drafts are picked by the noise of their position."""
    folder = folder_of(architecture, tmp_path)
    engine = LocalEngine(drafting_config(folder, folder))
    for seed, prompt in enumerate(prompts_of(1, 16, 17, 33, 90)):
        sampling = SamplingParams(
            temperature=0.9 * (seed % 2), seed=seed, frequency_penalty=0.5 * (seed % 3), logit_bias={7: 3.0}, top_p=0.8
        )  # fmt: skip
        engine.submit(prompt, max_tokens=30, sampling=sampling)
    engine.run()
    stats = engine.engine.scheduler.snapshot()
    assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position
    assert stats.draft_tokens_per_position[DEPTH - 1] > 20


@pytest.mark.parametrize(
    "architecture", [pytest.param("LlamaForCausalLM", marks=pytest.mark.slow), "Qwen3_5ForCausalLM"]
)
def test_no_depth_changes_a_text_alone_or_in_a_crowd(architecture: str, tmp_path: Path) -> None:
    model = folder_of(architecture, tmp_path / "model")
    draft = folder_of("Qwen2ForCausalLM", tmp_path / "draft", seed=1, num_hidden_layers=1)
    cases = [
        Case(tuple(prompt), 18, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, prompt in enumerate(prompts_of(1, 16, 17, 33, 90))
    ]
    config = drafting_config(model, draft, max_running=3)
    assert_depths_change_no_text(cases, config, (1, DEPTH))


def test_it_drafts_beyond_the_positions_that_it_was_made_for(tmp_path: Path) -> None:
    model = folder_of("LlamaForCausalLM", tmp_path / "model")
    draft = folder_of("LlamaForCausalLM", tmp_path / "draft", max_position_embeddings=32)
    engine = LocalEngine(drafting_config(model, draft))
    assert len(engine.generate(range(100), max_tokens=30)) == 30
    stats = engine.engine.scheduler.snapshot()
    assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position


def test_a_dummy_needs_no_weights(tmp_path: Path) -> None:
    folders = [folder_of("LlamaForCausalLM", tmp_path / name) for name in ("model", "draft")]
    for folder in folders:
        (folder / "model.safetensors").unlink()
    engine = LocalEngine(drafting_config(*folders, load_format="dummy", dtype="auto"))
    assert len(engine.generate(range(20), max_tokens=30)) == 30
    assert (engine.engine.info.drafter, engine.engine.info.depth) == ("draft_model", DEPTH)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("LlamaForCausalLM", {"vocab_size": 160}, "vocab_size is 160, the model has 151"),
        ("Qwen3_5ForCausalLM", {}, "Qwen3_5ForCausalLM has recurrent layers"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    architecture: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    model = folder_of("LlamaForCausalLM", tmp_path / "model")
    draft = folder_of(architecture, tmp_path / "draft", **changes)
    with pytest.raises(ModelError, match=message):
        assemble(drafting_config(model, draft), progress=lambda _: None)


def test_taps_are_for_heads(tmp_path: Path) -> None:
    model = folder_of("LlamaForCausalLM", tmp_path / "model")
    with pytest.raises(ModelError, match="--drafter-taps is for EAGLE-3 heads"):
        assemble(drafting_config(model, model, drafter_taps=(1, 2)), progress=lambda _: None)


def test_a_drafters_folder_without_a_known_kind_names_what_is_served(tmp_path: Path) -> None:
    model = folder_of("LlamaForCausalLM", tmp_path / "model")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({"architectures": ["Eagle2"]}))
    with pytest.raises(ModelError, match="Eagle2; supported are LlamaForCausalLMEagle3"):
        assemble(drafting_config(model, tmp_path / "draft"), progress=lambda _: None)


@pytest.mark.parametrize("layers", ["full", "fp8"])
@pytest.mark.parametrize("lm_head", ["full", "fp8", "int4"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_bytes_of_other_formats_are_known_before(
    lm_head: str, layers: str, is_tied: bool, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 160}
    model = folder_of("LlamaForCausalLM", tmp_path / "model", **sizes)
    draft = folder_of("LlamaForCausalLM", tmp_path / "draft", tie_word_embeddings=is_tied, **sizes)
    engine = assemble(drafting_config(model, draft, dtype="bfloat16"), progress=lambda _: None)
    drafter = engine.runner.launcher.context.drafter
    assert isinstance(drafter, ModelDrafter)
    head = drafter.model
    before, promised = bytes_of(head), head.added_bytes(lm_head, layers)  # type: ignore[arg-type]
    head.choose_formats(lm_head, layers)  # type: ignore[arg-type]
    assert promised == bytes_of(head) - before


def bytes_of(head: DraftLM) -> int:
    """Returns the bytes of all tensors of the weights, those of the embedding once."""
    found: dict[int, int] = {}

    def note(values: object) -> None:
        if isinstance(values, torch.Tensor):
            found[values.data_ptr()] = values.nbytes
        elif isinstance(values, tuple):
            for value in values:
                note(value)

    note(head._model.embedding)
    for linear in head.linears():
        note(linear.stored)
    return sum(found.values())
