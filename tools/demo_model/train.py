"""Trains the demo model: `PYTHONPATH=tools python -m demo_model.train --out FOLDER` on one GPU.

It prepares the corpus first unless --data names a prepared folder. It writes the checkpoint, the tokenizer
and metrics.json, which is measured on held-out modules with the saved weights, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo_model.chat import CHAT_TEMPLATE
from demo_model.corpus import Corpus
from demo_model.drafter import DrafterRecipe, train_drafter
from demo_model.evaluate import evaluate
from demo_model.learning import fit
from demo_model.lessons import stutter
from demo_model.model import DemoModel, ModelConfig, load_checkpoint, save_checkpoint
from demo_model.optimizer import Schedule
from demo_model.prepare import prepare
from demo_model.refine import RefinementRecipe, refine, to_device

GENERATION_CONFIG = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "eos_token_id": 0}
TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "model_max_length": 2048,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": CHAT_TEMPLATE,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of the first stage."""

    schedule: Schedule = Schedule(steps=5000, warmup_steps=200, muon_lr=0.02, adam_lr=3e-3)  # noqa: RUF009
    batch_size: int = 32
    tokens: int = 2048
    library_share: float = 0.45
    depth: int = 3
    draft_weight: float = 0.3
    dropout: float = 0.2
    weight_decay: float = 0.1
    seed: int = 0


def batches(corpus: Corpus, recipe: Recipe, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (ids, lessons) of random windows, [batch_size, tokens + depth + 1] each, without end."""
    rng = np.random.default_rng(recipe.seed)
    length = recipe.tokens + recipe.depth + 1
    while True:
        windows = (corpus.window(length, rng) for _ in range(recipe.batch_size))
        yield to_device([stutter(window, corpus.newline, rng) for window in windows], device)


def train(
    config: ModelConfig, recipe: Recipe, corpus: Corpus, device: torch.device
) -> tuple[DemoModel, float]:
    """Returns (the model after the first stage, the seconds of training after compilation)."""
    torch.manual_seed(recipe.seed)
    model = DemoModel(config, recipe.dropout).to(device)
    weights = [1.0] + [recipe.draft_weight] * recipe.depth + [0.0]
    seconds = fit(
        model,
        batches(corpus, recipe, device),
        recipe.schedule,
        weights,
        tokens=recipe.tokens,
        weight_decay=recipe.weight_decay,
    )
    return model, seconds


def write_model_files(model: DemoModel, data: Path, out: Path) -> None:
    """Writes everything that a MiMo loader reads, and the held-out prompts."""
    out.mkdir(parents=True, exist_ok=True)
    save_checkpoint(model, out)
    for name in ("tokenizer.json", "heldout_prompts.json"):
        shutil.copyfile(data / name, out / name)
    for name, value in (
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
    ):
        (out / name).write_text(json.dumps(value, indent=2) + "\n")


def run(recipe: Recipe, data: Path, out: Path, device: torch.device) -> None:
    """Trains in three stages, writes the files, and measures them."""
    corpus = Corpus.read(data, recipe.library_share)
    model, seconds = train(ModelConfig(), recipe, corpus, device)
    refinement, drafter = RefinementRecipe(), DrafterRecipe()
    seconds_by_stage = [seconds, refine(model, refinement, corpus), train_drafter(model, drafter, corpus)]
    write_model_files(model, data, out)
    metrics: dict[str, object] = {
        "recipe": asdict(recipe),
        "refinement": asdict(refinement),
        "drafter": asdict(drafter),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_seconds": [round(s, 1) for s in seconds_by_stage],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **evaluate(load_checkpoint(out).to(device), data),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--data", type=Path, help="folder written by demo_model.prepare")
    arguments = parser.parse_args()
    data = arguments.data or arguments.out / "data"
    if arguments.data is None:
        prepare(data)
    run(Recipe(), data, arguments.out, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
