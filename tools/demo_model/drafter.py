"""The third stage of training: the MTP layer alone, on the model's own text. The target is not changed.

In serving the drafter predicts the model's own text, and there is no dropout: this stage trains it like that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from demo_model.corpus import Corpus
from demo_model.model import DemoModel, DraftMask, draft_masks
from demo_model.optimizer import Schedule, optimizers
from demo_model.writing import PROMPT_TOKENS, own_text


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """The settings of the third stage."""

    schedule: Schedule = Schedule(steps=2500, warmup_steps=30, muon_lr=0.01, adam_lr=1e-3)  # noqa: RUF009
    rows: int = 96
    texts: int = 32_768
    texts_at_once: int = 4096
    library_share: float = 0.6
    sampled_share: float = 0.5
    depth: int = 3
    seed: int = 1


def draft_losses(model: DemoModel, ids: Tensor, masks: list[DraftMask]) -> Tensor:
    """Returns the loss of each draft step, [depth] float32: the mean of the cross-entropies with the target's
    distribution and with its most likely token. ids: [rows, tokens + depth + 1].

    Drafts from the prompt's last tokens on count. Each wrong draft multiplies the weight of the following
    steps by 0.3, because serving would not reach them.
    """
    depth = len(masks)
    tokens = ids.shape[1] - depth - 1
    with torch.no_grad():
        hidden = model.hidden(ids[:, :-1])
        target = model.logits(hidden).float().softmax(-1)
    weight = torch.ones(len(ids), tokens, device=ids.device)
    weight[:, : PROMPT_TOKENS - 2] = 0
    terms = []
    states = model.draft_states(hidden[:, :tokens], ids[:, : tokens + depth], masks)
    for step, state in enumerate(states, start=1):
        draft = model.lm_head(state).float().log_softmax(-1)
        wanted = target[:, step : step + tokens]
        likeliest = draft.gather(-1, wanted.argmax(-1, keepdim=True))[..., 0]
        loss = -0.5 * (likeliest + (wanted * draft).sum(-1))
        terms.append((loss * weight).sum() / weight.sum())
        is_hit = draft.argmax(-1) == ids[:, 1 + step : 1 + step + tokens]
        weight = weight * torch.where(is_hit, 1.0, 0.3)
    return torch.stack(terms)


def train_drafter(model: DemoModel, recipe: DrafterRecipe, corpus: Corpus) -> float:
    """Runs the third stage on the model, in place. Returns its seconds, including writing and compilation."""
    started = time.monotonic()
    device = model.lm_head.weight.device
    rng = np.random.default_rng(recipe.seed)
    torch.manual_seed(recipe.seed)
    model.eval().requires_grad_(False)
    drafter = model.model.mtp_layers.requires_grad_(True)
    corpus = replace(corpus, library_share=recipe.library_share)
    written = [
        own_text(model, corpus, min(recipe.texts_at_once, recipe.texts - done), recipe.sampled_share, rng)
        for done in range(0, recipe.texts, recipe.texts_at_once)
    ]
    texts = torch.cat(written)
    muon, adam = optimizers(drafter, 0.0)
    masks = draft_masks(texts.shape[1] - recipe.depth - 1, recipe.depth, device, is_sparse=False)
    compiled = torch.compile(draft_losses) if device.type == "cuda" else draft_losses
    batches_a_pass = len(texts) // recipe.rows
    for step in range(recipe.schedule.steps):
        if step % batches_a_pass == 0:
            order = torch.randperm(len(texts), device=device)
        begin = step % batches_a_pass * recipe.rows
        with torch.autocast(device.type, torch.bfloat16):
            terms = compiled(model, texts[order[begin : begin + recipe.rows]], masks)
        torch.autograd.backward(terms.sum())
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        recipe.schedule.advance(step, muon, adam)
        drafter.zero_grad(set_to_none=True)
    model.requires_grad_(True)
    return time.monotonic() - started
