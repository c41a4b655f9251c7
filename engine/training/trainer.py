"""Trains a head on the target's own distribution over the answers that it wrote. A resumed training gives the
same bits.

Batches depend on the settings only, so that the number of a step determines the position in the data.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import msgspec
import torch
from torch.nn import functional

from headway.engine.protocol.errors import ConfigError
from headway.engine.training.answers import Answer
from headway.engine.training.head import UNROLLED, Head, Target

STEP_WEIGHTS = (0.51, 0.31, 0.18)  # of the losses of the drafts, in turn
BETAS, CLIPPED_NORM, WARM_UP_SHARE = (0.9, 0.95), 1.0, 0.03
SORTED_AT_ONCE = 64  # batches' worth of answers that are sorted by length, so that little is padding
SHOWN_EVERY = 10
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that the result depends on besides the data. batch_tokens: the tokens of a step, padding
    included. max_length: the most tokens of a prompt and its answer; longer answers are cut."""

    draft_vocab: int
    epochs: int
    batch_tokens: int
    max_length: int
    learning_rate: float
    seed: int


class Scores(NamedTuple):
    """The scores of each draft in turn over the tokens of answers: the mean cross entropy with the target's
    distribution, and the share of drafts that are the target's most probable tokens."""

    losses: torch.Tensor  # [UNROLLED] float32
    agreement: torch.Tensor  # [UNROLLED] float32


def frequent_ids(answers: Sequence[Answer], count: int, vocab_size: int) -> torch.Tensor:
    """Returns [count] int64, ascending: the most frequent tokens of the answers, filled up with the first
    unused ones; all tokens if there are fewer."""
    counts = Counter(token for answer in answers for token in answer.answer)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:count]))


def share_drafted(answers: Sequence[Answer], draft_ids: torch.Tensor) -> float:
    """Returns the share of the answers' tokens that are among draft_ids, and so can be drafted."""
    drafted, tokens = set(draft_ids.tolist()), [token for answer in answers for token in answer.answer]
    return sum(token in drafted for token in tokens) / len(tokens)


def can_be_learnt(answer: Answer, max_length: int) -> bool:
    """Returns whether a token of the answer is left for the last draft."""
    return _length(answer, max_length) > max(len(answer.prompt), UNROLLED + 1)


def batches_of(answers: Sequence[Answer], settings: Settings) -> list[list[int]]:
    """Returns the indices of the answers of each step, over all epochs."""
    lengths = [_length(answer, settings.max_length) for answer in answers]
    usable = [index for index, answer in enumerate(answers) if can_be_learnt(answer, settings.max_length)]
    found: list[list[int]] = []
    for epoch in range(settings.epochs):
        chance, order = random.Random(f"{settings.seed}/{epoch}"), list(usable)
        chance.shuffle(order)
        size = SORTED_AT_ONCE * max(settings.batch_tokens // settings.max_length, 1)
        batches: list[list[int]] = []
        for first in range(0, len(order), size):
            batch: list[int] = []
            for index in sorted(order[first : first + size], key=lengths.__getitem__):
                if batch and (len(batch) + 1) * lengths[index] > settings.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(index)
            batches.append(batch)
        chance.shuffle(batches)
        found += batches
    return found


def scores(target: Target, head: Head, answers: Sequence[Answer], max_length: int) -> Scores:
    """Returns the head's scores over the tokens of the answers. The losses can be differentiated."""
    device = target.lm_head.device
    texts = [(a.prompt + a.answer)[:max_length] for a in answers]
    count = max(map(len, texts))
    ids = _sent([text + [0] * (count - len(text)) for text in texts], device)
    # The carry of slot i is at place i - 1 and predicts token i + 1.
    firsts = [max(len(a.prompt) - 2, UNROLLED - 1) for a in answers]
    places = [
        row * (count - 1) + place
        for row, (first, text) in enumerate(zip(firsts, texts, strict=True))
        for place in range(first, len(text) - 2)
    ]
    chosen = _sent(places, device)
    view = target.view(ids)
    logits = target.logits(view.hidden[:, 1:].flatten(0, 1).index_select(0, chosen))
    likeliest = logits.argmax(-1)
    wanted = logits.log_softmax(-1).index_select(1, head.draft_ids).exp()
    del logits
    losses, agreement = [], []
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for carry in head.unrolled(view):
            own = head.logits(carry.flatten(0, 1).index_select(0, chosen))
            losses.append(functional.cross_entropy(own, wanted))
            agreement.append((head.draft_ids[own.argmax(-1)] == likeliest).float().mean())
    return Scores(torch.stack(losses), torch.stack(agreement))


def _sent(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Returns the values on the device, for whose earlier work the host does not wait."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Trainer:
    """Mutable: owns the head and its optimizer, and the number of the next step."""

    def __init__(self, target: Target, answers: Sequence[Answer], settings: Settings) -> None:
        """Raises ConfigError where no answer can be learnt from."""
        self._target, self._answers, self._settings = target, answers, settings
        self._digest = hashlib.sha256(msgspec.msgpack.encode(list(answers))).hexdigest()
        self._batches, self.step = batches_of(answers, settings), 0
        if not self._batches:
            raise ConfigError("no answer of the data is long enough to learn from; give other data")
        self.num_steps = len(self._batches)
        device = target.lm_head.device
        ids = frequent_ids(answers, settings.draft_vocab, target.spec.vocab_size).to(device)
        self.head = Head(target, ids, seed=settings.seed).to(device)
        self._optimizer = torch.optim.AdamW(self.head.parameters(), betas=BETAS, weight_decay=0.0)

    def run(self, may_go_on: Callable[[], bool], tell: Callable[[int, Scores], None]) -> None:
        """Takes steps until all are done or may_go_on returns false. tell: is called now and then with the
        number of steps that are done and the scores of the last one. Raises ConfigError if the loss is not
        finite."""
        while self.step < self.num_steps and may_go_on():
            found = self._learn(self._batches[self.step])
            self.step += 1
            if self.step % SHOWN_EVERY == 0 or self.step == self.num_steps:
                if not found.losses.isfinite().all():
                    raise ConfigError(
                        f"the loss is {found.losses.tolist()} at step {self.step:,} with --learning-rate "
                        f"{self._settings.learning_rate:g}; give a lower one and another --out"
                    )
                tell(self.step, found)

    def _learn(self, batch: Sequence[int]) -> Scores:
        rate = self._settings.learning_rate * _share_of_rate(self.step, self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        answers = [self._answers[index] for index in batch]
        found = scores(self._target, self.head, answers, self._settings.max_length)
        self._optimizer.zero_grad(set_to_none=True)
        weighted = [weight * loss for weight, loss in zip(STEP_WEIGHTS, found.losses, strict=True)]
        torch.autograd.backward(torch.stack(weighted).sum())
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), CLIPPED_NORM)
        self._optimizer.step()
        return Scores(found.losses.detach(), found.agreement)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint with all that further steps depend on besides the data and the target. Raises
        OSError."""
        content = {
            **self._told(), "step": self.step, "head": self.head.state_dict(), "optimizer": self._optimizer.state_dict(),
        }  # fmt: skip
        unfinished = folder / f".{CHECKPOINT}"
        try:
            torch.save(content, unfinished)
        except RuntimeError as error:  # in this way torch tells of a full disk
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{unfinished} cannot be written; is the disk full? {error}") from None
        os.replace(unfinished, folder / CHECKPOINT)

    def _told(self) -> dict[str, object]:
        """Returns the values that a checkpoint must share with this trainer."""
        layer = hashlib.sha256()
        for tensor in self._target.layer.state_dict().values():
            layer.update(tensor.float().cpu().numpy().tobytes())
        own = {"num_steps": self.num_steps, "answers": self._digest, "model": layer.hexdigest()}
        return asdict(self._settings) | own

    def resume(self, folder: Path) -> None:
        """Continues from a saved checkpoint, if there is one. Raises ConfigError for one of other
        settings."""
        file = folder / CHECKPOINT
        if not file.exists():
            return
        try:
            content = torch.load(file, map_location=self._target.lm_head.device, weights_only=True)
        except (RuntimeError, EOFError, KeyError, UnpicklingError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; remove it to begin anew") from None
        own = self._told()
        if changed := [
            f"{name} {content.get(name)}, not {own[name]}" for name in own if content.get(name) != own[name]
        ]:
            raise ConfigError(
                f"{file} was made with {', '.join(changed)}; give the same model, settings and data, or another --out"
            )
        self.head.load_state_dict(content["head"])
        self._optimizer.load_state_dict(content["optimizer"])
        self.step = content["step"]


def _length(answer: Answer, max_length: int) -> int:
    return min(len(answer.prompt) + len(answer.answer), max_length)


def _share_of_rate(step: int, num_steps: int) -> float:
    """Returns the share of the learning rate: a straight line up, then half a cosine down to 0."""
    rising = max(round(WARM_UP_SHARE * num_steps), 1)
    if step < rising:
        return (step + 1) / rising
    return 0.5 + 0.5 * math.cos(math.pi * (step - rising) / max(num_steps - rising, 1))
