"""EAGLE-3 heads: every draft is the oracle's, which is built of transformers' layers; sampled drafts share
the target's noise; and no draft changes a text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.eagle import EagleOracle, Layout, constructed_eagle
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

from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

VOCAB = 151
prompts_of = partial(random_prompts, VOCAB)
LAYOUTS: tuple[Layout, ...] = ("original", "speculators")


def poisoned(config: EngineConfig) -> LocalEngine:
    """What belongs to no row holds rubbish."""
    engine = LocalEngine(config)
    engine.loop._runner = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    return engine


def pad(engine: LocalEngine) -> None:
    """Pads its steps as those of a GPU are."""
    grid = StepGrid(row_counts(4), prompt_counts=(16, 64), mixed_counts=(16, 64))
    PaddedLaunches(engine.engine.runner, grid)


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> Proposals:
    return note_proposals(monkeypatch)


@pytest.mark.parametrize(
    ("architecture", "changes", "is_padded"),
    [
        ("LlamaForCausalLM", {}, False),
        pytest.param("Qwen3ForCausalLM", {"style": "qwen3", "options": ("norm_before_residual", "norm_before_fc")}, True, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {"options": ("fc_norm", "norm_output"), "taps": (1, 2, 3)}, True, marks=pytest.mark.slow),
        pytest.param("Qwen3_5ForCausalLM", {"options": ("norm_output",), "attention_bias": True, "mlp_bias": True}, False, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {"hidden_size": 32, "owns_embedding": True, "draft_vocab": VOCAB}, False, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", {"mask_token": 7, "options": ("norm_before_fc",)}, True, marks=pytest.mark.slow),
    ],
    ids=["llama", "qwen3-norms", "eagle-3.1", "hybrid-biases", "own-width", "parallel"],
)  # fmt: skip
def test_every_draft_is_the_oracles_from_both_layouts(
    architecture: str, changes: dict[str, object], is_padded: bool, proposals: Proposals, tmp_path: Path
) -> None:
    """Across chunks of prompts, prefix hits, rejected and accepted drafts, and spells of every depth."""
    target = tiny_model(architecture, num_hidden_layers=4)
    save(target, architecture, tmp_path / "model")
    oracle = EagleOracle(target, **changes)  # type: ignore[arg-type]
    found: list[Proposals] = []
    for layout in LAYOUTS:
        drafter = oracle.save(tmp_path / layout, layout)
        config = drafting_config(tmp_path / "model", drafter, synthetic_acceptance=(0.8, 0.7, 0.6, 0.5))
        engine = poisoned(msgspec.structs.replace(config, prefill_chunk=64))
        if is_padded:
            pad(engine)
        texts = text_of(engine, prompts_of(1, 2, 3, 17, 32, 75), 70)
        texts += text_of(engine, [texts[5][: len(texts[5]) - 20]], 40)
        assert engine.engine.scheduler.snapshot().num_cached_prompt_tokens >= 64
        found.append(list(proposals))
        proposals.clear()
    assert found[0] == found[1]
    assert {len(drafts) for _, _, drafts in found[0]} == {1, 2, 3, DEPTH}
    assert len(found[0]) > 80
    for seed, length, drafts in found[0]:
        num_valid = min(len(drafts), len(texts[seed]) - 1 - length)  # no pair stands at the last token
        wanted = oracle.drafts(torch.tensor(texts[seed][: length + 1]), num_valid)
        assert drafts[:num_valid] == wanted, (seed, length)


@pytest.mark.parametrize("mask_token", [None, 9], ids=["one-by-one", "parallel"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["plain", "padded"])
def test_layers_after_the_first_are_ordinary_ones(
    is_padded: bool, mask_token: int | None, proposals: Proposals, tmp_path: Path
) -> None:
    """Their keys depend on what the first attends to: never to position 0, which has no pair."""
    target = tiny_model("LlamaForCausalLM")
    save(target, "LlamaForCausalLM", tmp_path / "model")
    oracle = EagleOracle(target, num_hidden_layers=3, mask_token=mask_token)
    engine = poisoned(drafting_config(tmp_path / "model", oracle.save(tmp_path / "drafter", "speculators")))
    if is_padded:
        pad(engine)
    (text,) = text_of(engine, prompts_of(40), 40)
    assert len(proposals) > 20
    for _, length, drafts in proposals:
        num_valid = min(len(drafts), len(text) - 1 - length)
        assert drafts[:num_valid] == oracle.drafts(torch.tensor(text[: length + 1]), num_valid), length


@pytest.mark.parametrize(
    ("architecture", "mask_token"),
    [
        ("LlamaForCausalLM", None),
        pytest.param("Qwen3ForCausalLM", None, marks=pytest.mark.slow),
        pytest.param("Qwen3_5ForCausalLM", None, marks=pytest.mark.slow),
        pytest.param("LlamaForCausalLM", 7, marks=pytest.mark.slow),
        pytest.param("Qwen3_5ForCausalLM", 7, marks=pytest.mark.slow),
    ],
)
def test_no_depth_changes_a_text_alone_or_in_a_crowd(
    architecture: str, mask_token: int | None, tmp_path: Path
) -> None:
    target = tiny_model(architecture)
    save(target, architecture, tmp_path / "model")
    head = EagleOracle(target, mask_token=mask_token)
    drafter = head.save(tmp_path / "drafter", "original")
    never_drafted = sorted(set(range(VOCAB)) - set(head.ids.tolist()))
    kinds: tuple[dict[str, object], ...] = (
        {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.8, "allowed_token_ids": never_drafted}, {"temperature": 0.0, "repetition_penalty": 1.3},
    )  # fmt: skip
    cases = [
        Case(tuple(prompt), 18, SamplingParams(seed=seed, **kinds[seed]))  # type: ignore[arg-type]
        for seed, prompt in enumerate(prompts_of(1, 16, 17, 33, 90))
    ]
    config = drafting_config(tmp_path / "model", drafter, max_running=3)
    assert_depths_change_no_text(cases, config, range(1, DEPTH + 1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [1, DEPTH])
def test_every_draft_of_the_constructed_head_is_accepted(depth: int, layout: Layout, tmp_path: Path) -> None:
    """Which none would be if the head read another position, or carried on something else."""
    model, drafter = constructed_eagle(tmp_path, layout)
    engine = LocalEngine(drafting_config(model, drafter, depth=depth, dtype="float32"))
    for number in range(4):
        prompt = [(7 * number + i) % 128 for i in range(2 + 9 * number)]
        engine.submit(prompt, max_tokens=30)
    engine.run()
    stats = engine.engine.scheduler.snapshot()
    assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position
    assert stats.draft_tokens_per_position[depth - 1] > 10


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_sampled_drafts_are_rejected_only_for_tokens_that_the_head_lacks(
    temperature: float, tmp_path: Path
) -> None:
    """Both give every token the same probability wherever it stands, so that noise, penalties and bias alone
    decide: those of the target's ids."""
    target = tiny_model("LlamaForCausalLM")
    head = EagleOracle(target, draft_vocab=60, dtype=torch.float32)
    with torch.no_grad():
        for module in (target, head):
            for name, parameter in module.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
        target.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight[:1].expand(VOCAB, -1))
        target.lm_head.weight.mul_(0.3)
        head.fc.weight.copy_(torch.cat([torch.zeros(48, 48), torch.eye(48)], dim=1))
        head.norm.weight.copy_(target.model.norm.weight)
        head.lm_head.weight.copy_(target.lm_head.weight[head.ids])
    target.save_pretrained(tmp_path / "model")
    drafter = head.save(tmp_path / "drafter", "speculators")
    ids = set(head.ids.tolist())
    engine = LocalEngine(drafting_config(tmp_path / "model", drafter, depth=1, dtype="float32"))
    bias = {7: 2.0, 8: 2.0, min(ids): -100.0}
    for seed, prompt in enumerate(prompts_of(5, 20, 33)):
        sampling = SamplingParams(
            temperature=temperature, seed=seed, logit_bias=bias, frequency_penalty=0.6 * (seed % 2)
        )
        engine.submit(prompt, max_tokens=120, sampling=sampling)
    outputs = engine.run()
    verdicts = [
        (event.token_ids[event.draft_start] in ids, event.num_accepted == 1)
        for output in outputs.values()
        for event in output.events
        if event.num_drafted
    ]
    assert all(is_drafted == is_accepted for is_drafted, is_accepted in verdicts)
    assert {True, False} == {is_accepted for _, is_accepted in verdicts}
    assert len(verdicts) > 100


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", "float32", "auto"),
        pytest.param("cuda", "bfloat16", "auto", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", "auto,ngram", marks=pytest.mark.gpu),
    ],
)
def test_captured_rounds_change_no_text(device: str, dtype: str, name: str, tmp_path: Path) -> None:
    """With sizes for which the fused kernels of a GPU are made."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    target = tiny_model("LlamaForCausalLM", num_hidden_layers=4, **sizes)
    save(target, "LlamaForCausalLM", tmp_path / "model")
    head = EagleOracle(target, taps=(1, 2, 3), draft_vocab=320, dtype=torch.float32, **sizes)
    drafter = head.save(tmp_path / "drafter", "speculators")
    texts = []
    for depth in (0, 3):
        changes = {"device": device, "dtype": dtype, "depth": depth, "kv_cache_memory_bytes": 1 << 26}
        engine = LocalEngine(drafting_config(tmp_path / "model", drafter, drafter=name, **changes))
        engine.engine.runner.capture(range(depth + 1), progress=lambda _: None)
        for seed, prompt in enumerate(prompts_of(3, 40, 17, 64, 90, 33)):
            sampling = SamplingParams(temperature=0.8 * (seed % 2), seed=seed)
            engine.submit(prompt, max_tokens=32, sampling=sampling)
        texts.append([output.token_ids for output in engine.run().values()])
    assert texts[0] == texts[1]
    assert engine.engine.scheduler.snapshot().draft_tokens_per_position[2] > 20
