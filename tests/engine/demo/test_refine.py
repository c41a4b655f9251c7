"""The second and third stage of training, on a tiny model: what changes and what stays."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from headway_testing.demo_model import TINY
from tokenizers import Tokenizer

from demo_model import model, refine, writing
from demo_model.corpus import Corpus
from demo_model.drafter import DrafterRecipe, train_drafter
from demo_model.evaluate import complete
from demo_model.learning import losses
from demo_model.lessons import LEARN, UNLEARN
from demo_model.optimizer import Schedule
from demo_model.writing import NEW_TOKENS, PROMPT_TOKENS, own_text, write_on

DEMO = Path(str(files("headway.engine.demo")))
CPU = torch.device("cpu")
LENGTH = PROMPT_TOKENS + NEW_TOKENS


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    rng = np.random.default_rng(0)
    (tmp_path / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    newline = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("\n").ids[0]
    for name in ("library", "tests"):
        tokens = rng.integers(300, 340, size=6000, dtype=np.uint16)
        tokens[::7] = newline
        np.save(tmp_path / f"{name}.npy", tokens)
    return Corpus.read(tmp_path, 0.5)


@pytest.fixture
def tiny() -> model.DemoModel:
    torch.manual_seed(0)
    return model.DemoModel(TINY)


def test_writing_on_greedily_is_what_evaluation_completes(tiny: model.DemoModel) -> None:
    prompts = torch.randint(300, 340, (3, 20), generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(tiny.lm_head.weight)
    written = write_on(tiny, prompts, torch.zeros(3, 12))
    completed = complete(tiny, prompts.tolist(), temperature=0.0, new_tokens=12)
    assert torch.equal(written, completed.ids[:, :32])


def test_own_text_begins_with_prompts_that_end_where_a_line_does(
    tiny: model.DemoModel, corpus: Corpus
) -> None:
    texts = own_text(tiny, corpus, 5, 0.5, np.random.default_rng(0))
    assert texts.shape == (5, LENGTH)
    assert (texts[:, PROMPT_TOKENS - 1] == corpus.newline).all()


def test_unlikelihood_is_of_what_is_to_be_unlearnt(tiny: model.DemoModel) -> None:
    ids = torch.randint(300, 340, (2, 16), generator=torch.Generator().manual_seed(0))
    lessons = torch.full_like(ids, LEARN)
    masks = model.draft_masks(12, 3, CPU, is_sparse=False)
    assert losses(tiny, ids, lessons, masks)[-1] == 0
    lessons[:, 5] = UNLEARN
    unlikelihood = losses(tiny, ids, lessons, masks)[-1]
    said = tiny.logits(tiny.hidden(ids[:, :12])).softmax(-1)[:, 4].gather(-1, ids[:, 5:6])
    expected = -(1 - said).log().sum() / (2 * 11)
    torch.testing.assert_close(unlikelihood, expected, atol=1e-5, rtol=0.0)
    torch.autograd.backward(unlikelihood)
    assert tiny.lm_head.weight.grad is not None


@pytest.mark.slow
def test_refining_averages_seeded_runs(
    tiny: model.DemoModel, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "PROMPT_TOKENS", 48)
    monkeypatch.setattr(writing, "NEW_TOKENS", 40)
    one = refine.RefinementRecipe(
        lectures=(refine.Lecture(1.0, True, 0),),
        schedule=Schedule(steps=2, warmup_steps=1, muon_lr=0.01, adam_lr=1e-3),
        batch_size=4,
        tokens=48 + 40 - 4,
        own_rows=1,
        texts_a_row=1,
        steps_a_writing=2,
    )
    other = replace(one, lectures=(refine.Lecture(3.0, False, 1),))
    both = replace(one, lectures=one.lectures + other.lectures)
    start = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    ends = []
    for recipe in (one, other, both, both):
        tiny.load_state_dict(start)
        refine.refine(tiny, recipe, corpus)
        ends.append({name: tensor.clone() for name, tensor in tiny.state_dict().items()})
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(ends[0][name], start[name])
    assert not torch.equal(ends[0][name], ends[1][name])
    torch.testing.assert_close(ends[2][name], (ends[0][name] + ends[1][name]) / 2)
    assert all(torch.equal(ends[2][n], ends[3][n]) for n in start)


def test_the_drafter_alone_learns_in_its_stage(tiny: model.DemoModel, corpus: Corpus) -> None:
    start = {name: tensor.clone() for name, tensor in tiny.state_dict().items()}
    recipe = DrafterRecipe(
        schedule=Schedule(steps=3, warmup_steps=1, muon_lr=0.01, adam_lr=1e-3),
        rows=2,
        texts=6,
        texts_at_once=4,
    )
    train_drafter(tiny, recipe, corpus)
    changed = {n for n, tensor in tiny.state_dict().items() if not torch.equal(tensor, start[n])}
    assert changed
    assert all(n.startswith("model.mtp_layers.") for n in changed)
    assert all(p.requires_grad for p in tiny.parameters())
