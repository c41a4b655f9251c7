"""N-gram lookup beside another drafter: each row's choice is the oracle's, both kinds are chosen, and no text
changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path

import pytest
from headway_testing.checkpoints import constructed_mimo
from headway_testing.eagle import EagleOracle, constructed_eagle
from headway_testing.exactness import Case, assert_depths_change_no_text
from headway_testing.families import save, tiny_model
from headway_testing.hybrid import constructed_hybrid
from headway_testing.local import LocalEngine
from headway_testing.marks import slow_but
from headway_testing.padded import PaddedLaunches
from headway_testing.poison import PoisoningRunner
from headway_testing.proposals import note_proposals, random_prompts

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.layers.causal_lm import TargetStates
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.speculation.joined import WEIGHT, JoinedDrafter
from headway.engine.speculation.mtp import MtpDrafter
from headway.engine.speculation.ngram import NgramDrafter

VOCAB, DEPTH = 128, 4
prompts_of = partial(random_prompts, VOCAB)


def config_of(model: Path, folder: Path | None = None, **changes: object) -> EngineConfig:
    fixed = {
        "model_path": str(model), "device": "cpu", "dtype": "float64", "depth": DEPTH, "kv_cache_memory_bytes": 1 << 24,
        "drafter": "auto,ngram", "drafter_path": None if folder is None else str(folder),
    }  # fmt: skip
    return EngineConfig(**(fixed | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "is_padded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "padded"]
)
def test_the_one_that_was_right_more_often_drafts(
    is_padded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By row, across moves of rows, preemptions and prefix hits. Every second request predicts its output,
    but for the end."""
    constructed_mimo(tmp_path, noise=0.1)
    prompts = prompts_of(1, 20, 33, 40, 5, 17, 90, 16)
    samplings = [SamplingParams(temperature=0.5 * (seed % 3), seed=seed) for seed in range(len(prompts))]
    plain = LocalEngine(config_of(tmp_path, drafter="none"))
    texts = [
        plain.generate(prompt, max_tokens=60, sampling=sampling)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    joined = note_proposals(monkeypatch, JoinedDrafter)
    alone = [note_proposals(monkeypatch, kind) for kind in (MtpDrafter, NgramDrafter)]
    began: list[tuple[int, int]] = []  # seed, and the number of proposals when its prompt was computed
    observe = JoinedDrafter.observe_prompts

    def noting(drafter: JoinedDrafter, prompts: PromptTokens, states: TargetStates) -> None:
        observe(drafter, prompts, states)
        rows = drafter._rows
        began.extend((int(rows.seeds[row]), len(joined)) for row in prompts.rows)

    monkeypatch.setattr(JoinedDrafter, "observe_prompts", noting)
    engine = LocalEngine(
        config_of(tmp_path, max_running=3, max_model_len=160, kv_cache_memory_bytes=13 * 16 * 1600), reads_late=True
    )  # fmt: skip
    engine.loop._runner = PoisoningRunner(engine.engine.runner, engine.engine.scheduler)
    if is_padded:
        grid = StepGrid(row_counts(4), prompt_counts=(16, 64), mixed_counts=(16, 64))
        PaddedLaunches(engine.engine.runner, grid)
    for seed, prompt in enumerate(prompts):
        prediction = texts[seed][:30] if seed % 2 else []
        engine.submit(prompt, max_tokens=60, sampling=samplings[seed], prediction=prediction)
    assert [output.token_ids for output in engine.run().values()] == texts
    assert engine.engine.scheduler.snapshot().num_preemptions > 0
    assert len(joined) == len(alone[0]) == len(alone[1]) > 200
    choices: set[bool] = set()
    for seed, prompt in enumerate(prompts):
        whole, proposals = [*prompt, *texts[seed]], [i for i, entry in enumerate(joined) if entry[0] == seed]
        begins = sorted(at for number, at in began if number == seed)
        averages, before = [0.0, 0.0], -1
        for i, following in zip(proposals, [*proposals[1:], None], strict=True):
            _, length, drafts = joined[i]
            if any(before < at <= i for at in begins):
                averages = [0.0, float(seed % 2)]
            before, both = i, [proposed[i][2] for proposed in alone]
            if abs(averages[1] - averages[0]) > 1e-5 or averages[1] == averages[0]:
                assert drafts == both[averages[1] > averages[0]], (seed, length, averages)
            if both[0] != both[1]:
                choices.add(averages[1] > averages[0])
            known = whole[length + 1 : joined[following][1] + 1] if following is not None else []
            for which, proposed in enumerate(both):
                pairs = list(zip(proposed, known, strict=False))
                right = next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
                averages[which] += WEIGHT * (right - averages[which])
    assert choices == {False, True}


def folders_of_eagle3(path: Path) -> tuple[Path, Path]:
    target = tiny_model("LlamaForCausalLM")
    save(target, "LlamaForCausalLM", path / "model")
    return path / "model", EagleOracle(target).save(path / "drafter", "speculators")


def folders_of_draft_model(path: Path) -> tuple[Path, Path]:
    for name, seed in (("model", 0), ("draft", 1)):
        save(tiny_model("Qwen3ForCausalLM", seed=seed), "Qwen3ForCausalLM", path / name)
    return path / "model", path / "draft"


FOLDERS: dict[str, Callable[[Path], tuple[Path, Path | None]]] = {
    "mtp": lambda path: (constructed_mimo(path, noise=0.1), None),
    "hybrid": lambda path: (constructed_hybrid(path, noise=0.07), None),
    "eagle3": folders_of_eagle3,
    "draft_model": folders_of_draft_model,
}


@pytest.mark.parametrize("kind", slow_but(["mtp"], FOLDERS))
def test_no_depth_changes_a_text_alone_or_in_a_crowd(kind: str, tmp_path: Path) -> None:
    model, drafter = FOLDERS[kind](tmp_path)
    cases = [
        Case(tuple(prompt), 24, SamplingParams(temperature=0.7 * (seed % 2), seed=seed))
        for seed, prompt in enumerate(prompts_of(1, 16, 17, 33, 90))
    ]
    config = config_of(model, drafter, max_running=3)
    drafters = assert_depths_change_no_text(cases, config, (1, DEPTH))
    assert set(drafters) == {{"hybrid": "mtp"}.get(kind, kind) + ",ngram"}


def test_every_draft_of_a_head_that_is_always_right_is_accepted(tmp_path: Path) -> None:
    engine = LocalEngine(config_of(*constructed_eagle(tmp_path, "original"), dtype="float32"))
    for prompt in prompts_of(2, 11, 20):
        engine.submit(prompt, max_tokens=30)
    engine.run()
    stats = engine.engine.scheduler.snapshot()
    assert stats.accepted_tokens_per_position == stats.draft_tokens_per_position


@pytest.mark.slow
def test_with_a_prediction_both_take_fewer_rounds_than_either() -> None:
    """The prediction lacks two spans of the text, in which the head drafts."""
    demo = Path(str(files("headway.engine.demo")))
    prompts = [prompt[:60] for prompt in heldout_prompts()[:2]]
    texts: list[list[int]] = []
    rounds = []
    for drafter in ("none", "mtp", "ngram", "mtp,ngram"):
        engine = LocalEngine(config_of(demo, drafter=drafter, depth=8, dtype="float32"))
        for seed, prompt in enumerate(prompts):
            predicted = [*texts[seed][:40], *texts[seed][60:90], *texts[seed][110:]] if texts else []
            sampling = SamplingParams(temperature=1.0, seed=seed)
            engine.submit(prompt, max_tokens=150, sampling=sampling, prediction=predicted)
        found = [output.token_ids for output in engine.run().values()]
        texts = texts or found
        assert found == texts
        rounds.append(sum(engine.engine.scheduler.snapshot().row_rounds_by_emitted_tokens.values()))
    assert rounds[3] < 0.95 * min(rounds[1:3]), rounds
