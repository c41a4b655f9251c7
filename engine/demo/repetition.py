"""The second stage of training: teaches the demo model not to say a line over and over.

The model writes on from corpus prompts, and learns there what a frozen copy of it would say under a rule: a line
that stands in the text already is made less likely, at the first token that gives it away. On the corpus it keeps
saying what the copy says. The drafter follows the target on both.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.engine.demo.corpus import Corpus
from headway.engine.demo.model import DemoModel, DraftMask, draft_masks

MAX_KEY = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class RepetitionRecipe:
    """Everything that decides the second stage besides the corpus and the model it starts from."""

    steps: int = 2800
    lr: float = 5e-4
    warmup_steps: int = 50
    written_rows: int = 64
    prompt_tokens: int = 160
    new_tokens: int = 160
    steps_a_writing: int = 32
    lead_tokens: int = 64
    corpus_rows: int = 4
    corpus_tokens: int = 2048
    corpus_weight: float = 1.0
    drafted_tokens: int = 512
    depth: int = 4
    window: int = 256
    nats: tuple[float, ...] = (0.0, 1.0, 10.0)
    seed: int = 1


@dataclass(frozen=True, slots=True)
class LineRule:
    """How much less likely a token is that would begin the n-th copy of a line."""

    newline: int
    is_newline: Tensor  # [vocab] bool
    is_space: Tensor  # [vocab] bool: tokens of blanks and tabs alone
    window: int  # tokens back in which the earlier copies stand
    nats: Tensor  # [copies + 1] float32: the penalty after so many copies, the last one for more
    salt: Tensor  # [tokens] int64, random: tells a line's tokens apart by their place

    @staticmethod
    def of(corpus: Corpus, recipe: RepetitionRecipe, device: torch.device) -> LineRule:
        tokens = recipe.prompt_tokens + recipe.new_tokens
        salt = torch.randint(MAX_KEY, (tokens,), generator=torch.Generator().manual_seed(recipe.seed))
        is_space, nats = torch.from_numpy(corpus.is_space), torch.tensor(recipe.nats)
        is_newline = torch.arange(len(is_space)) == corpus.newline
        return LineRule(
            corpus.newline,
            is_newline.to(device),
            is_space.to(device),
            recipe.window,
            nats.to(device),
            salt.to(device),
        )

    def penalties(self, ids: Tensor, start: int) -> Tensor:
        """What to take from the logits of the tokens at start, start + 1, ...

        ids [rows, tokens] int64 -> [rows, tokens - start, vocab] float32

        A token is penalised if, of the earlier lines that begin as this one does, all that go on with the token
        are copies of one line; indentation is no part of a line. After `a = b.x` and `a = b.y`, a line that
        begins `a = b.` has x and y penalised. Where the tokens before have said already which line it is, the rest
        is free after one copy, and the end of the line always: the line is to be another, not a longer one.
        A copy that follows a copied line counts twice.
        """
        vocab = len(self.is_space)
        lines = self._lines(ids)
        now = torch.arange(start, ids.shape[1], device=ids.device)
        then = now[:, None] - torch.arange(1, self.window + 1, device=ids.device)  # [now, window]
        is_open, is_going_on = self._open_lines(ids, lines, now, then)
        then = then.clamp(min=0)
        token, key = ids[:, then], lines.key[:, then]
        shape = (len(ids), len(now), vocab)
        count = ids.new_zeros(shape, dtype=torch.int32)
        count.scatter_add_(2, token, is_open.int() + is_going_on.int())
        low, high = torch.where(is_open, key, MAX_KEY), torch.where(is_open, key, -MAX_KEY)
        lowest = ids.new_full(shape, MAX_KEY).scatter_reduce_(2, token, low, "amin")
        highest = ids.new_full(shape, -MAX_KEY).scatter_reduce_(2, token, high, "amax")
        was_known = (low.amin(2) == high.amax(2)) & (lines.offset[:, now] > 0)
        is_late = was_known[..., None] & ((count < 2) | self.is_newline)
        return self.nats[count.clamp(max=len(self.nats) - 1)] * ((lowest == highest) & ~is_late)

    def _open_lines(self, ids: Tensor, lines: Lines, now: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
        """Whether `then` is at the same place of an earlier line that has begun as the line of `now`, and
        whether the line before is a copy too.

        Both [rows, now, window] bool; the lines' contents agree in the `offset` tokens before.
        """
        before = torch.arange(ids.shape[1], device=ids.device)
        back = before[:, None] - torch.arange(1, self.window + 1, device=ids.device)
        is_same = (ids[..., None] == ids[:, back.clamp(min=0)]) & (back >= 0)
        last_unequal = torch.where(is_same, -1, before[:, None]).cummax(1).values[:, now - 1]
        offset = lines.offset[:, now, None]
        at = then.clamp(min=0)
        is_open = (
            (then >= 0)
            & lines.is_content[:, at]
            & (lines.offset[:, at] == offset)
            & (now[:, None] - 1 - last_unequal >= offset)
        )
        return is_open, is_open & (last_unequal < lines.before[:, now, None])

    def _lines(self, ids: Tensor) -> Lines:
        position = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        ends = (ids == self.newline).long()
        line = ends.cumsum(1) - ends  # a newline belongs to the line that it ends
        content = torch.where(self.is_space[ids], ids.shape[1], position)
        first = torch.full_like(ids, ids.shape[1]).scatter_reduce_(1, line, content, "amin").gather(1, line)
        offset = (position - first).clamp(min=0)
        is_content = (position >= first) & ((ids != self.newline) | (offset > 0))
        hashed = torch.where(is_content, (ids + 1) * self.salt[offset], 0)
        key = torch.zeros_like(ids).scatter_add_(1, line, hashed).gather(1, line)
        begin = torch.full_like(ids, ids.shape[1]).scatter_reduce_(1, line, position, "amin").gather(1, line)
        begins = torch.where(is_content, begin, -1).cummax(1).values
        before = torch.where(begin > 0, begins.gather(1, (begin - 1).clamp(min=0)), -1)
        return Lines(offset, is_content, key, before)


@dataclass(frozen=True, slots=True)
class Lines:
    """Where each token stands in its line, each [rows, tokens]."""

    offset: Tensor  # int64: tokens of the line before it, indentation left out
    is_content: Tensor  # bool: neither indentation nor the end of a blank line
    key: Tensor  # int64: the same for lines of the same content (a hash)
    before: Tensor  # int64: where the line before that is not blank begins, or -1


@torch.no_grad()
def write_on(model: DemoModel, prompts: Tensor, temperatures: Tensor) -> Tensor:
    """Prompts and what the model adds, a token for each column of temperatures; 0 is greedy.

    prompts [rows, prompt] int64, temperatures [rows, new] float32 -> [rows, prompt + new] int64
    """
    rows, prompt_tokens = prompts.shape
    new_tokens = temperatures.shape[1]
    ids = F.pad(prompts, (0, new_tokens))
    caches = model.empty_caches(rows, prompt_tokens + new_tokens)
    logits = model.logits(model.hidden(prompts, caches)[:, -1])
    for new in range(new_tokens):
        noise = -torch.empty_like(logits, dtype=torch.float32).exponential_().log()
        ids[:, prompt_tokens + new] = (logits + temperatures[:, new, None] * noise).argmax(-1)
        if new + 1 < new_tokens:
            at = prompt_tokens + new
            logits = model.logits(model.step(ids[:, at], at, caches))
    return ids


class Writer:
    """Texts that the model writes on from corpus prompts, many at a time; keeps a bfloat16 copy of it."""

    def __init__(self, model: DemoModel, corpus: Corpus, recipe: RepetitionRecipe) -> None:
        self.model = model
        self.copy = copy.deepcopy(model).bfloat16().requires_grad_(False)
        self.corpus = corpus
        self.recipe = recipe
        self.rng = np.random.default_rng(recipe.seed)
        device = model.lm_head.weight.device
        rows = recipe.written_rows * recipe.steps_a_writing
        self.prompts = torch.zeros(rows, recipe.prompt_tokens, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows, recipe.new_tokens, device=device)
        self.write = captured(lambda: write_on(self.copy, self.prompts, self.temperatures), device)

    def batches(self) -> Iterator[Tensor]:
        """[written_rows, prompt_tokens + new_tokens] int64, for ever; the copy is renewed now and then."""
        r = self.recipe
        while True:
            torch._foreach_copy_(list(self.copy.parameters()), list(self.model.parameters()))
            drawn = self.corpus.prompts(len(self.prompts), r.prompt_tokens, self.rng)
            self.prompts.copy_(torch.from_numpy(drawn))
            self.temperatures.copy_(torch.from_numpy(self.drawn_temperatures()))
            yield from torch.split(self.write(), r.written_rows)

    def drawn_temperatures(self) -> npt.NDArray[np.float32]:
        """[rows, new_tokens]: a quarter of the rows greedy, a quarter at some temperature, and half greedy
        after a lead at temperature 1, which takes them away from texts known by heart."""
        rows, new_tokens = self.temperatures.shape
        kind = self.rng.integers(4, size=(rows, 1))
        steady = self.rng.uniform(0.3, 1.0, (rows, 1))
        leads = self.rng.integers(1, self.recipe.lead_tokens + 1, (rows, 1))
        is_lead = np.arange(new_tokens) < leads
        return np.where(kind == 0, 0.0, np.where(kind == 1, steady, is_lead)).astype(np.float32)


def captured(function: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The function as a CUDA graph, which reads and writes the same tensors at each call; itself without CUDA."""
    if device.type != "cuda":
        return function
    torch.cuda.synchronize()
    with torch.Stream(device):  # a first run compiles and allocates, which a graph cannot
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def target_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Mean divergence of what is said from what should be.  # both [rows, tokens, vocab]"""
    said, wanted = logits.float().log_softmax(-1), teacher.float().log_softmax(-1)
    return (wanted.exp() * (wanted - said)).sum(-1).mean()


def draft_loss(
    model: DemoModel, hidden: Tensor, logits: Tensor, ids: Tensor, masks: list[DraftMask]
) -> Tensor:
    """Cross-entropy of each draft step with the target's distribution, and with its likeliest token, half each.

    ids [rows, tokens]; hidden and logits [rows, tokens, ...] are the target's, which learns nothing from this.
    """
    tokens = ids.shape[1] - len(masks)
    target = logits.detach().float().softmax(-1)
    terms = []
    for step, state in enumerate(model.draft_states(hidden[:, :tokens].detach(), ids, masks), start=1):
        draft = model.lm_head(state).float().log_softmax(-1)
        wanted = target[:, step : step + tokens]
        likeliest = draft.gather(-1, wanted.argmax(-1, keepdim=True))[..., 0]
        terms.append(-0.5 * ((wanted * draft).sum(-1) + likeliest).mean())
    return torch.stack(terms).mean()


class Lesson:
    """One step's losses and gradients, over two tensors that are filled anew before each: `written` and `real`."""

    def __init__(self, model: DemoModel, rule: LineRule, recipe: RepetitionRecipe) -> None:
        self.model = model
        self.base = copy.deepcopy(model).requires_grad_(False)
        self.rule = rule
        self.recipe = recipe
        self.drafter = list(model.model.mtp_layers.parameters())
        device = model.lm_head.weight.device
        written_tokens = recipe.prompt_tokens + recipe.new_tokens
        self.written = torch.zeros(recipe.written_rows, written_tokens, dtype=torch.int64, device=device)
        self.real = torch.zeros(recipe.corpus_rows, recipe.corpus_tokens, dtype=torch.int64, device=device)
        self.masks, self.real_masks = (
            draft_masks(tokens - recipe.depth, recipe.depth, device, is_sparse=False)
            for tokens in (written_tokens, recipe.drafted_tokens)
        )
        self.learn = captured(self._learn, device)

    def _learn(self) -> Tensor:
        """Leaves the gradients in the parameters.  # the losses, [4] float32"""
        recipe, model = self.recipe, self.model
        model.zero_grad(set_to_none=True)
        with torch.autocast(self.written.device.type, torch.bfloat16):
            with torch.no_grad():
                ruled, plain = (self.base.logits(self.base.hidden(ids)) for ids in (self.written, self.real))
                ruled[:, recipe.prompt_tokens - 1 : -1] -= self.rule.penalties(
                    self.written, recipe.prompt_tokens
                )
            hidden, real_hidden = model.hidden(self.written), model.hidden(self.real)
            logits, real_logits = model.logits(hidden), model.logits(real_hidden)
            near = slice(recipe.drafted_tokens)
            terms = [
                target_loss(logits, ruled),
                target_loss(real_logits, plain),
                draft_loss(model, hidden[::2], logits[::2], self.written[::2], self.masks),
                draft_loss(
                    model,
                    real_hidden[::4, near],
                    real_logits[::4, near],
                    self.real[::4, near],
                    self.real_masks,
                ),
            ]
        torch.autograd.backward(terms[0] + recipe.corpus_weight * terms[1])
        torch.autograd.backward(terms[2] + terms[3], inputs=self.drafter)
        return torch.stack(terms).detach()


def refine(model: DemoModel, recipe: RepetitionRecipe, corpus: Corpus) -> float:
    """Runs the second stage on the model, in place; seconds."""
    started = time.monotonic()
    device = model.lm_head.weight.device
    model.eval()
    torch.manual_seed(recipe.seed)
    adam = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
    )
    rule = LineRule.of(corpus, recipe, device)
    lesson = Lesson(model, rule, recipe)
    writer = Writer(model, corpus, recipe)
    rng = np.random.default_rng(recipe.seed)
    for step, written in zip(range(recipe.steps), writer.batches(), strict=False):
        real = torch.from_numpy(corpus.windows(recipe.corpus_rows, recipe.corpus_tokens, rng))
        lesson.written.copy_(written)
        lesson.real.copy_(real.pin_memory() if device.type == "cuda" else real, non_blocking=True)
        terms = lesson.learn()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min((step + 1) / recipe.warmup_steps, 1 - step / recipe.steps)
        for group in adam.param_groups:
            group["lr"] = factor * recipe.lr
        adam.step()
        if step % 100 == 0 or step == recipe.steps - 1:
            shown = " ".join(f"{t:.4f}" for t in terms.tolist())
            print(f"step {step:5d}  losses {shown}  {time.monotonic() - started:6.1f} s", flush=True)
    return time.monotonic() - started
