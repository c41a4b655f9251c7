"""The training loop and the losses that the first two stages share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from demo_model.lessons import LEARN, UNLEARN
from demo_model.model import DemoModel, DraftMask, draft_masks
from demo_model.optimizer import Schedule, optimizers

SOFT_SHARE = 0.5  # of a draft's loss
TINY = 1e-6  # keeps log(1 - p) finite where p rounds to 1
LOG_EVERY = 250


def losses(model: DemoModel, ids: Tensor, lessons: Tensor, masks: list[DraftMask]) -> Tensor:
    """Returns the cross-entropy of the next token, the loss of each draft step, and the unlikelihood loss,
    [1 + depth + 1] float32. ids and lessons: [rows, tokens + depth + 1].

    A draft's loss compares it with the true token and, for SOFT_SHARE of the loss, with the target's own
    distribution at that position, because a draft is accepted if it equals the target's token. Every second
    row drafts. The unlikelihood loss is -log(1 - p) of the tokens to unlearn, weighted like the tokens to
    learn.
    """
    depth = len(masks)
    tokens = ids.shape[1] - depth - 1
    hidden = model.hidden(ids[:, :tokens])
    said = model.logits(hidden).float().log_softmax(-1)
    lesson = lessons[:, 1 : tokens + 1]
    of_truth = said.gather(-1, ids[:, 1 : tokens + 1, None])[..., 0]
    learnt = (lesson == LEARN).sum()
    terms = [-(of_truth * (lesson == LEARN)).sum() / learnt]
    unlikelihood = -(torch.log1p(TINY - of_truth.exp()) * (lesson == UNLEARN)).sum() / learnt
    target = said[::2].detach().exp()
    ids, lessons = ids[::2], lessons[::2]
    for step, state in enumerate(model.draft_states(hidden[::2], ids[:, : tokens + depth], masks), start=1):
        draft = model.lm_head(state).float().log_softmax(-1)
        ahead = slice(1 + step, 1 + step + tokens)
        is_learnt = lessons[:, ahead] == LEARN
        hard = -(draft.gather(-1, ids[:, ahead, None])[..., 0] * is_learnt).sum() / is_learnt.sum()
        soft = -(target[:, step:] * draft[:, : tokens - step]).sum(-1).mean()
        terms.append((1 - SOFT_SHARE) * hard + SOFT_SHARE * soft)
    return torch.stack([*terms, unlikelihood])


def fit(
    model: DemoModel,
    batches: Iterator[tuple[Tensor, Tensor]],
    schedule: Schedule,
    weights: list[float],
    *,
    tokens: int,
    weight_decay: float,
) -> float:
    """Trains the model in place. weights: of the losses. Returns the seconds after the first step, which
    compiles."""
    device = model.lm_head.weight.device
    model.train()
    muon, adam = optimizers(model, weight_decay)
    masks = draft_masks(tokens, len(weights) - 2, device, is_sparse=device.type == "cuda")
    compiled = torch.compile(losses) if device.type == "cuda" else losses
    weighing = torch.tensor(weights, device=device)
    started = time.monotonic()
    for step, (ids, lessons) in zip(range(schedule.steps), batches, strict=False):
        with torch.autocast(device.type, torch.bfloat16):
            terms = compiled(model, ids, lessons, masks)
        torch.autograd.backward((terms * weighing).sum())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        schedule.advance(step, muon, adam)
        model.zero_grad(set_to_none=True)
        if step == 0:
            terms.tolist()
            started = time.monotonic()
        if step % LOG_EVERY == 0 or step == schedule.steps - 1:
            shown = " ".join(f"{t:.3f}" for t in terms.tolist())
            print(f"step {step:5d}  losses {shown}  {time.monotonic() - started:6.1f} s", flush=True)
    return time.monotonic() - started
