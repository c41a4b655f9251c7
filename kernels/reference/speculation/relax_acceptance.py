"""Accepts drafts that the target finds probable enough, while a row reasons (PyTorch twin). LOSSY: the text
is no longer what the target samples."""

from __future__ import annotations

import torch


def relax_acceptance(
    sampled: torch.Tensor,  # [rows, depth + 1] int64, in place: all places but the last
    logits: torch.Tensor,  # [rows, depth + 1, vocab] float: the logits of `sampled`
    tokens: torch.Tensor,  # [rows, depth + 1] int64: a token, then the drafts
    is_valid: torch.Tensor,  # [rows, depth + 1] bool: of the same; a row without valid tokens is padding
    state_ids: torch.Tensor,  # [rows] int64: lines of `spans`, each once
    spans: torch.Tensor,  # [N, 3] int64, the phases in place
    top_k: int,
    max_gap: float,
) -> None:
    """Overwrites the target's sampled tokens with the drafts that are accepted.

    This is the relaxed acceptance of TensorRT-LLM's MTP decoding, applied to the softmax of the logits at
    temperature 1. A draft is accepted if those before it were, and if it equals the target's sampled token
    or, in a row that reasons, fewer than top_k tokens are more probable and the most probable one is so by at
    most max_gap.

    A line of spans is (phase, start id, end id). Phase 0: the row does not reason, and will not. 1: it
    reasons. 2: it reasons from its next token on if that is the start id, else not at all. Phase 1 ends with
    the end id. The phase after the call includes the row's token and its accepted drafts; drafts after an end
    id in the same window are verified without relaxation. With max_gap 0.2, top_k 2 and end id 9:

        tokens   5 6 9 7      probability of the drafts .4 .3 .6, of the best token .5 .4 .8
        sampled  8 9 4 3  ->  6 9 4 3, of which verification accepts 6 and 9; phase 1 becomes 0
    """
    depth = tokens.shape[1] - 1
    is_probable = _is_probable(logits[:, :depth], tokens[:, 1:], top_k, max_gap)
    phases, starts, ends = spans.index_select(0, state_ids).unbind(1)
    is_accepted = is_valid[:, 0]
    for place in range(depth + 1):
        token = tokens[:, place]
        if place > 0:
            own = sampled[:, place - 1]
            is_accepted = is_accepted & is_valid[:, place]
            is_relaxed = is_accepted & (phases == 1) & is_probable[:, place - 1]
            own.copy_(torch.where(is_relaxed, token, own))
            is_accepted = is_accepted & (own == token)
        phases = torch.where(is_accepted, _phase_after(phases, token, starts, ends), phases)
    spans[:, 0].index_copy_(0, state_ids, phases)


def _is_probable(
    logits: torch.Tensor,  # [rows, depth, vocab]
    drafts: torch.Tensor,  # [rows, depth] int64
    top_k: int,
    max_gap: float,
) -> torch.Tensor:
    """Returns whether each draft is probable enough, [rows, depth] bool. It is not if a logit is NaN or +inf,
    or if its probability is 0."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    own = values.gather(2, drafts[:, :, None])
    best = values.amax(2, keepdim=True)
    gap = (1 - (own - best).exp()) / (values - best).exp().sum(2, keepdim=True)
    is_near = (gap <= max_gap) & (own > -torch.inf)
    return (is_near & ((values > own).sum(2, keepdim=True) < top_k))[:, :, 0]


def _phase_after(
    phases: torch.Tensor, token: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    reasons = ((phases == 1) & (token != ends)) | ((phases == 2) & (token == starts))
    return reasons.to(phases.dtype)
