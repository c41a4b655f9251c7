"""The second stage of training: against the loops that small models fall into when they decode greedily.

The model completes unfamiliar text greedily; where it says a line again, the tokens of that line are made less
likely there (unlikelihood, Welleck et al., 2019, on whole lines). A frozen copy holds it in place elsewhere.
The drafts learn on the same texts to say what the changed target says.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from headway.engine.demo.evaluate import complete
from headway.engine.demo.model import DemoModel, draft_masks

ROUNDS, ROWS, ROWS_PER_STEP = 8, 48, 12
# A window of the corpus the model knows by heart, then its own words at temperature 1, which it does not.
CORPUS_TOKENS, OWN_TOKENS, NEW_TOKENS = 48, 24, 112
ANCHOR_ROWS, ANCHOR_TOKENS = 2, 384
LEARNING_RATE = 3e-4
ANCHOR_WEIGHT = 2.0
DRAFT_DEPTH = 3
# A line of LONG_LINE tokens may be said once, a shorter one twice (`else:` and `pass` return in good code).
LONG_LINE = 5
# The penalty is a mean over the repeated tokens of a step, but over no fewer than these.
MIN_REPEATED = 60


@dataclass(frozen=True, slots=True)
class LineVocabulary:
    """What the tokens mean for lines: which one ends them, and which are white space only."""

    newline: int
    blanks: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> LineVocabulary:
        blanks = [i for i in range(tokenizer.get_vocab_size()) if not tokenizer.decode([i]).strip()]
        return cls(tokenizer.encode("\n").ids[0], frozenset(blanks))

    def repeated(self, ids: Sequence[int]) -> list[bool]:
        """Which tokens belong to a line that has been said too often already; white space never does."""
        marks = [False] * len(ids)
        said: Counter[tuple[int, ...]] = Counter()
        begin = 0
        for end, token in enumerate(ids):
            if token != self.newline:
                continue
            places = [i for i in range(begin, end) if ids[i] not in self.blanks]
            line = tuple(ids[i] for i in places)
            if said[line] >= (1 if len(line) >= LONG_LINE else 2):
                for i in places:
                    marks[i] = True
            said[line] += 1
            begin = end + 1
        return marks


def unlearn_loops(model: DemoModel, data: Path, seed: int) -> None:
    """Trains the model in place, without dropout."""
    model.eval()
    reference = copy.deepcopy(model).requires_grad_(False)
    vocabulary = LineVocabulary.of(Tokenizer.from_file(str(data / "tokenizer.json")))
    stream = np.load(data / "library.npy").astype(np.int64)
    rng = np.random.default_rng(seed)
    parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for round_index in range(ROUNDS):
        ids, is_repeated = own_text(model, stream, vocabulary, rng)
        print(f"round {round_index:2d}  repeated tokens {is_repeated.float().mean():.3f}", flush=True)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - round_index / ROUNDS)
        for rows in torch.from_numpy(rng.permutation(ROWS).reshape(-1, ROWS_PER_STEP)):
            anchor = _windows(stream, ANCHOR_ROWS, ANCHOR_TOKENS, rng).to(ids.device)
            loss = penalty(model, ids[rows], is_repeated[rows]) + draft_loss(model, ids[rows])
            loss = loss + ANCHOR_WEIGHT * anchor_loss(model, reference, anchor)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()


def own_text(
    model: DemoModel, stream: npt.NDArray[np.int64], vocabulary: LineVocabulary, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """(ids, is_repeated) of fresh greedy completions, prompts included.  # both [ROWS, tokens]"""
    known = CORPUS_TOKENS + OWN_TOKENS
    corpus = _windows(stream, ROWS, CORPUS_TOKENS, rng).tolist()
    seed = int(rng.integers(2**31))
    sampled = (
        complete(model, corpus, temperature=1.0, new_tokens=OWN_TOKENS, seed=seed).ids[:, :known].tolist()
    )
    ids = complete(model, sampled, temperature=0.0, new_tokens=NEW_TOKENS).ids[:, : known + NEW_TOKENS]
    marks = [[False] * known + vocabulary.repeated(row[known:]) for row in ids.tolist()]
    return ids, torch.tensor(marks, device=ids.device)


def _windows(stream: npt.NDArray[np.int64], rows: int, tokens: int, rng: np.random.Generator) -> Tensor:
    starts = rng.integers(len(stream) - tokens, size=rows)
    return torch.from_numpy(np.stack([stream[s : s + tokens] for s in starts]))


def penalty(model: DemoModel, ids: Tensor, is_repeated: Tensor) -> Tensor:
    """-log(1 - p) of the repeated tokens."""
    log_p = model.logits(model.hidden(ids[:, :-1])).log_softmax(-1)
    chosen = log_p.gather(-1, ids[:, 1:, None])[..., 0].clamp(max=-1e-6)
    unlikely = torch.log(-torch.expm1(chosen)) * is_repeated[:, 1:]
    return -unlikely.sum() / is_repeated.sum().clamp(min=MIN_REPEATED)


def anchor_loss(model: DemoModel, reference: DemoModel, ids: Tensor) -> Tensor:
    """Cross-entropy with the frozen copy's distribution."""
    target = reference.logits(reference.hidden(ids)).softmax(-1)
    return -(target * model.logits(model.hidden(ids)).log_softmax(-1)).sum(-1).mean()


def draft_loss(model: DemoModel, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the draft steps with the target's distribution; only the MTP layer learns from it."""
    tokens = ids.shape[1] - DRAFT_DEPTH - 1
    with torch.no_grad():
        hidden = model.hidden(ids[:, :tokens])
        target = model.logits(hidden).softmax(-1)
    masks = draft_masks(tokens, DRAFT_DEPTH, ids.device, is_sparse=False)
    steps = []
    for step, state in enumerate(model.draft_states(hidden, ids[:, : tokens + DRAFT_DEPTH], masks), start=1):
        log_draft = F.linear(state[:, : tokens - step], model.lm_head.weight.detach()).log_softmax(-1)
        steps.append(-(target[:, step:] * log_draft).sum(-1).mean())
    return torch.stack(steps).mean()
