"""The second stage of training: teaches the model not to repeat a line a third time.

Repetitions inserted into corpus windows and the model's own text contain such lines, which the model unlearns
while it continues to learn the corpus. Two runs from the same weights, one milder and one stricter, are
averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from demo_model.corpus import Corpus, Tokens
from demo_model.learning import fit
from demo_model.lessons import Lessons, echoed, own_text_lessons
from demo_model.model import DemoModel
from demo_model.optimizer import Schedule
from demo_model.writing import own_text


@dataclass(frozen=True, slots=True)
class Lecture:
    """The settings of one run."""

    unlikelihood_weight: float
    is_corpus_spared: bool  # third copies in the corpus are ignored, not learnt
    seed: int


@dataclass(frozen=True, slots=True)
class RefinementRecipe:
    """The settings of the second stage."""

    lectures: tuple[Lecture, ...] = (Lecture(1.5, True, 0), Lecture(3.0, False, 1))
    schedule: Schedule = Schedule(steps=1400, warmup_steps=50, muon_lr=0.006, adam_lr=9e-4)  # noqa: RUF009
    batch_size: int = 32
    tokens: int = 2048
    depth: int = 3
    own_rows: int = 8  # rows of a batch with the model's own text
    texts_a_row: int = 6
    sampled_share: float = 0.33
    steps_a_writing: int = 100
    draft_weight: float = 0.3
    weight_decay: float = 0.1


def refine(model: DemoModel, recipe: RefinementRecipe, corpus: Corpus) -> float:
    """Runs the second stage on the model, in place. Returns its seconds."""
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
    seconds = 0.0
    for lecture in recipe.lectures:
        model.load_state_dict(start)
        torch.manual_seed(lecture.seed)
        weights = [1.0] + [recipe.draft_weight] * recipe.depth + [lecture.unlikelihood_weight]
        seconds += fit(
            model,
            lessons(model, recipe, lecture, corpus),
            recipe.schedule,
            weights,
            tokens=recipe.tokens,
            weight_decay=recipe.weight_decay,
        )
        for name, tensor in model.state_dict().items():
            mean[name] += tensor / len(recipe.lectures)
    model.load_state_dict(mean)
    return seconds


def lessons(
    model: DemoModel, recipe: RefinementRecipe, lecture: Lecture, corpus: Corpus
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (ids, lessons), [batch_size, tokens + depth + 1] each, without end. The model's own text is in
    the first even rows, because even rows draft; it is written anew after `steps_a_writing` batches."""
    rng = np.random.default_rng(lecture.seed)
    length = recipe.tokens + recipe.depth + 1
    device = model.lm_head.weight.device
    while True:
        written = iter(_written_rows(model, recipe, corpus, rng))
        for _ in range(recipe.steps_a_writing):
            rows: list[tuple[Tokens, Lessons]] = []
            for n in range(recipe.batch_size):
                if n % 2 == 0 and n < 2 * recipe.own_rows:
                    ids = next(written)
                    rows.append((ids, own_text_lessons(ids, corpus)))
                else:
                    window = corpus.window(length, rng)
                    rows.append(echoed(window, corpus, rng, is_corpus_spared=lecture.is_corpus_spared))
            yield to_device(rows, device)


def _written_rows(
    model: DemoModel, recipe: RefinementRecipe, corpus: Corpus, rng: np.random.Generator
) -> Tokens:
    """Returns own text for `steps_a_writing` batches, [rows, tokens + depth + 1], several texts per row."""
    rows = recipe.own_rows * recipe.steps_a_writing
    texts = own_text(model, corpus, rows * recipe.texts_a_row, recipe.sampled_share, rng)
    ids: Tokens = texts.cpu().numpy().reshape(rows, -1)
    return ids[:, : recipe.tokens + recipe.depth + 1]


def to_device(rows: list[tuple[Tokens, Lessons]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns (ids [rows, length] int64, lessons [rows, length] int8), copied asynchronously."""
    ids, lessons = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    if device.type == "cuda":
        ids, lessons = ids.pin_memory(), lessons.pin_memory()
    return ids.to(device, non_blocking=True), lessons.to(device, non_blocking=True)
