"""Trains the demo model: `python -m headway.engine.demo.train --out FOLDER` on one GPU.

Prepares the corpus first unless --data names a prepared folder. Writes the checkpoint, the tokenizer and
metrics.json, measured on held-out modules with the weights as saved, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from headway.engine.demo.evaluate import evaluate
from headway.engine.demo.model import (
    DemoModel,
    DraftMask,
    ModelConfig,
    draft_masks,
    load_checkpoint,
    save_checkpoint,
)
from headway.engine.demo.optimizer import Muon
from headway.engine.demo.prepare import prepare

GENERATION_CONFIG = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 0}
TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|endoftext|>",
    "model_max_length": 2048,
    "tokenizer_class": "PreTrainedTokenizerFast",
}

IGNORED = -100  # the label that cross_entropy leaves out
MAX_STUTTER = 3  # lines at once, and times
Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights besides the corpus and the model's shape."""

    steps: int = 5000
    batch_size: int = 32
    tokens: int = 2048
    library_share: float = 0.45
    depth: int = 3
    draft_weight: float = 0.3
    soft_share: float = 0.5
    dropout: float = 0.2
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 200
    seed: int = 0


def batches(data: Path, recipe: Recipe, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) of random windows, from library code or its tests.

    Both are [batch_size, tokens + depth + 1] int64; labels are the ids, or IGNORED where nothing is to be learnt.
    """
    library, tests = (np.load(data / f"{name}.npy") for name in ("library", "tests"))
    newline = Tokenizer.from_file(str(data / "tokenizer.json")).encode("\n").ids[0]
    rng = np.random.default_rng(recipe.seed)
    length = recipe.tokens + recipe.depth + 1
    while True:
        rows = []
        for _ in range(recipe.batch_size):
            stream = library if rng.random() < recipe.library_share else tests
            start = rng.integers(len(stream) - length)
            rows.append(stutter(stream[start : start + length].astype(np.int64), newline, rng))
        pairs = torch.from_numpy(np.stack(rows, axis=1))
        ids, labels = pairs.pin_memory() if device.type == "cuda" else pairs
        yield ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def stutter(ids: Tokens, newline: int, rng: np.random.Generator) -> Tokens:
    """Says one to three of the window's lines again, one to three times, and teaches only how to go on.

    ids [length] int64 -> [2, length] int64, ids and labels. Small models fall into repeating themselves; the
    windows show what follows a repetition, and never teach the repetition itself.
    """
    labels = ids
    ends = np.flatnonzero(ids == newline) + 1
    if len(ends) > MAX_STUTTER:
        last = rng.integers(MAX_STUTTER, len(ends))
        begin, end = ends[last - rng.integers(1, MAX_STUTTER + 1)], ends[last]
        echo = np.tile(ids[begin:end], rng.integers(1, MAX_STUTTER + 1))
        labels = np.concatenate([ids[:end], np.full_like(echo, IGNORED), ids[end:]])[: len(ids)]
        ids = np.concatenate([ids[:end], echo, ids[end:]])[: len(ids)]
    return np.stack([ids, labels])


def losses(
    model: DemoModel, ids: Tensor, labels: Tensor, masks: list[DraftMask], soft_share: float
) -> Tensor:
    """Cross-entropy of the next token, then the loss of each draft step.  # [1 + depth] float32

    A draft is compared with the true token and, for `soft_share` of its loss, with the target's own
    distribution at that position: to be accepted it must say what the target says. Every second row drafts.
    """
    depth = len(masks)
    tokens = ids.shape[1] - depth - 1
    hidden = model.hidden(ids[:, :tokens])
    logits = model.logits(hidden).float()
    terms = [F.cross_entropy(logits.flatten(0, 1), labels[:, 1 : tokens + 1].flatten())]
    target = logits[::2].detach().softmax(-1)
    ids, labels = ids[::2], labels[::2]
    for step, state in enumerate(model.draft_states(hidden[::2], ids[:, : tokens + depth], masks), start=1):
        draft = model.lm_head(state).float()
        wanted = labels[:, 1 + step : 1 + step + tokens]
        hard = F.cross_entropy(draft.flatten(0, 1), wanted.flatten())
        soft = -(target[:, step:] * draft[:, : tokens - step].log_softmax(-1)).sum(-1)
        is_taught = (wanted[:, : tokens - step] != IGNORED).float()
        terms.append((1 - soft_share) * hard + soft_share * (soft * is_taught).sum() / is_taught.sum())
    return torch.stack(terms)


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """A linear rise, then a straight line to zero."""
    warmup = (step + 1) / recipe.warmup_steps
    return min(warmup, (recipe.steps - step) / (recipe.steps - recipe.warmup_steps), 1.0)


def optimizers(model: DemoModel, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    """Muon for the matrices of the blocks; AdamW for embedding, lm_head, norms and biases."""
    named = list(model.named_parameters())
    vectors = [p for _, p in named if p.dim() == 1]
    tables = [p for name, p in named if "embed_tokens" in name or "lm_head" in name]
    matrices = [
        p for name, p in named if p.dim() == 2 and "embed_tokens" not in name and "lm_head" not in name
    ]
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.adam_lr,
        betas=(0.9, 0.95),
        fused=model.lm_head.weight.is_cuda,
    )
    return Muon(matrices, weight_decay=recipe.weight_decay), adam


def train(config: ModelConfig, recipe: Recipe, data: Path, device: torch.device) -> tuple[DemoModel, float]:
    """(the trained model, seconds of training after compilation)."""
    torch.manual_seed(recipe.seed)
    model = DemoModel(config, recipe.dropout).to(device)
    muon, adam = optimizers(model, recipe)
    masks = draft_masks(recipe.tokens, recipe.depth, device, is_sparse=device.type == "cuda")
    compiled = torch.compile(losses) if device.type == "cuda" else losses
    weights = torch.tensor([1.0] + [recipe.draft_weight] * recipe.depth, device=device)
    started = time.monotonic()
    for step, (ids, labels) in zip(range(recipe.steps), batches(data, recipe, device), strict=False):
        with torch.autocast(device.type, torch.bfloat16):
            terms = compiled(model, ids, labels, masks, recipe.soft_share)
        torch.autograd.backward((terms * weights).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = learning_rate_factor(step, recipe)
        for group in adam.param_groups:
            group["lr"] = factor * recipe.adam_lr
        adam.step()
        muon.step(factor * recipe.muon_lr)
        model.zero_grad(set_to_none=True)
        if step == 0:
            terms.tolist()
            started = time.monotonic()
        if step % 250 == 0 or step == recipe.steps - 1:
            shown = " ".join(f"{t:.3f}" for t in terms.tolist())
            print(f"step {step:5d}  losses {shown}  {time.monotonic() - started:6.1f} s", flush=True)
    return model, time.monotonic() - started


def write_model_files(model: DemoModel, data: Path, out: Path) -> None:
    """Everything a MiMo loader reads, and the held-out prompts."""
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
    """Trains, writes the files, measures what was written."""
    model, seconds = train(ModelConfig(), recipe, data, device)
    write_model_files(model, data, out)
    metrics: dict[str, object] = {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_tokens": recipe.steps * recipe.batch_size * recipe.tokens,
        "train_seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        **evaluate(load_checkpoint(out).to(device), data),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--data", type=Path, help="folder written by headway.engine.demo.prepare")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="optimizer steps")
    arguments = parser.parse_args()
    data = arguments.data or arguments.out / "data"
    if arguments.data is None:
        prepare(data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run(Recipe(steps=arguments.steps), data, arguments.out, device)


if __name__ == "__main__":
    main()
