"""Measures a demo model on held-out modules: bits per byte, acceptance rate by position, repetition, syntax.

`PYTHONPATH=tools python -m demo_model.evaluate --model FOLDER --data FOLDER` prints the figures of the model
card. Acceptance is computed over whole generated sequences, by replaying the rounds that serving would run.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_model.model import DemoModel, draft_masks, load_checkpoint
from demo_model.prepare import END_OF_TEXT, is_valid_so_far

NEW_TOKENS = 128
DEPTH = 4
SAMPLED_TEMPERATURE = 0.8
REPEATS = 3
SPOT_CHECK_PROMPTS = 20  # prompts, each by itself, for a check that takes seconds


@dataclass(frozen=True, slots=True)
class Completions:
    """Prompts and the model's completions."""

    ids: Tensor  # [rows, tokens] int64
    starts: Tensor  # [rows] int64, lengths of the prompts
    noise: Tensor | None  # [rows, tokens, vocab] float32, added to the logits of each token; None: greedy
    temperature: float

    def pick(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Returns the sampled token at each position, [rows, n] int64. logits: [rows, n, vocab]; positions:
        [rows, n] int64."""
        if self.noise is None:
            return logits.argmax(-1)
        rows = torch.arange(len(self.ids), device=logits.device)[:, None]
        return (logits / self.temperature + self.noise[rows, positions]).argmax(-1)


@torch.no_grad()
def bits_per_byte(model: DemoModel, texts: list[str], tokenizer: Tokenizer) -> float:
    """Returns the bits per byte of whole texts, which are cut into independent windows of the context
    length."""
    device = model.lm_head.weight.device
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    length = model.config.max_position_embeddings
    nats = 0.0
    for text in texts:
        ids = torch.tensor([end_of_text, *tokenizer.encode(text).ids], device=device)
        for start in range(0, len(ids) - 1, length):
            window = ids[start : start + length + 1]
            logits = model.logits(model.hidden(window[None, :-1]))[0]
            nats += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
    return nats / math.log(2) / sum(len(t.encode()) for t in texts)


@torch.no_grad()
def complete(
    model: DemoModel,
    prompts: list[list[int]],
    *,
    temperature: float,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
) -> Completions:
    """Returns completions, greedy at temperature 0, else sampled with Gumbel noise. They have DEPTH tokens
    more than new_tokens, with which the last drafts are compared."""
    device = model.lm_head.weight.device
    starts = torch.tensor([len(p) for p in prompts], device=device)
    total = int(starts.max()) + new_tokens + DEPTH
    ids = torch.zeros(len(prompts), total, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    noise = (
        _gumbel_noise((len(prompts), total, model.config.vocab_size), device, seed)
        if temperature > 0
        else None
    )
    done = Completions(ids, starts, noise, temperature)
    caches = model.empty_caches(len(prompts), total)
    for position in range(total - 1):
        logits = model.logits(model.step(ids[:, position], position, caches))
        after = torch.full((len(prompts), 1), position + 1, device=device)
        chosen = done.pick(logits[:, None], after)[:, 0]
        ids[:, position + 1] = torch.where(starts <= position + 1, chosen, ids[:, position + 1])
    return done


def _gumbel_noise(shape: tuple[int, int, int], device: torch.device, seed: int) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))


@torch.no_grad()
def accepted_drafts(model: DemoModel, done: Completions) -> Tensor:
    """Returns the number of DEPTH drafts that would be accepted if a round began at each position, [rows,
    bases] int64. Base n is MTP slot n + 1, whose first draft is the token at position n + 2."""
    bases = done.ids.shape[1] - DEPTH - 1
    hidden = model.hidden(done.ids[:, :bases])
    masks = draft_masks(bases, DEPTH, done.ids.device, is_sparse=False)
    agreed = []
    for step, state in enumerate(model.draft_states(hidden, done.ids[:, : bases + DEPTH], masks), start=1):
        positions = torch.arange(step + 1, step + 1 + bases, device=done.ids.device).expand(len(done.ids), -1)
        agreed.append(done.pick(model.lm_head(state), positions) == done.ids.gather(1, positions))
    return torch.stack(agreed).long().cumprod(0).sum(0)


def acceptance(accepted: Tensor, starts: Tensor, *, new_tokens: int = NEW_TOKENS, depth: int) -> list[float]:
    """Returns the share of rounds in which drafts 1..s were all accepted, for s = 1..depth.

    The rounds are those of serving: a round whose last known token is at position p has the base p - 1. It
    emits its accepted drafts and one more token, so that the next round's last known token is at p + accepted
    + 1.
    """
    counts: Counter[int] = Counter()
    for row, start in zip(accepted.tolist(), starts.tolist(), strict=True):
        position = start
        while position < start + new_tokens - depth:
            taken = min(row[position - 1], depth)
            counts[taken] += 1
            position += taken + 1
    rounds = counts.total()
    return [
        round(sum(n for taken, n in counts.items() if taken >= s) / rounds, 4) for s in range(1, depth + 1)
    ]


def texts(done: Completions, tokenizer: Tokenizer, *, new_tokens: int = NEW_TOKENS) -> list[tuple[str, str]]:
    """Returns (prompt, completion) of each row."""
    rows = zip(done.ids.tolist(), done.starts.tolist(), strict=True)
    return [(tokenizer.decode(r[:s]), tokenizer.decode(r[s : s + new_tokens])) for r, s in rows]


def repeats_a_line(text: str) -> bool:
    """Returns whether a line that is not blank occurs three times or more, ignoring indentation."""
    lines = Counter(s for line in text.splitlines() if (s := line.strip()))
    return any(n >= REPEATS for n in lines.values())


def evaluate(model: DemoModel, data: Path) -> dict[str, object]:
    """Returns every figure of the model card. data: a folder written by demo_model.prepare."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    held_out = [str(m["text"]) for m in json.loads((data / "heldout.json").read_text())]
    prompt_texts = [str(p["text"]) for p in json.loads((data / "heldout_prompts.json").read_text())]
    prompts = [tokenizer.encode(t).ids for t in prompt_texts]
    figures: dict[str, object] = {
        "corpus": json.loads((data / "corpus.json").read_text()),
        "bits_per_byte": round(bits_per_byte(model, held_out, tokenizer), 4),
        "spot_check_bits_per_byte": round(
            bits_per_byte(model, prompt_texts[:SPOT_CHECK_PROMPTS], tokenizer), 4
        ),
    }
    for name, temperature in (("greedy", 0.0), ("sampled", SAMPLED_TEMPERATURE)):
        done = complete(model, prompts, temperature=temperature)
        accepted = accepted_drafts(model, done)
        pairs = texts(done, tokenizer)
        inside = torch.stack(
            [row[s - 1 : s - 1 + NEW_TOKENS] for row, s in zip(accepted, done.starts, strict=True)]
        )
        everywhere = [round((inside >= s).float().mean().item(), 4) for s in range(1, DEPTH + 1)]
        figures[name] = {
            "acceptance_at_every_position": everywhere,
            "acceptance_by_rounds_of_depth_3": acceptance(accepted, done.starts, depth=3),
            "acceptance_by_rounds_of_depth_4": acceptance(accepted, done.starts, depth=4),
            "repeats_a_line": sum(repeats_a_line(completion) for _, completion in pairs),
            "valid_syntax": sum(is_valid_so_far(prompt + completion) for prompt, completion in pairs),
            "completions": len(pairs),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder written by demo_model.prepare")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(evaluate(load_checkpoint(arguments.model).to(device), arguments.data), indent=1))


if __name__ == "__main__":
    main()
