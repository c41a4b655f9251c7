"""Picks tokens for rows of the slot table, and scores them; the rules themselves are kernels."""

from __future__ import annotations

import torch

from headway.engine.scheduling.limits import MAX_LOGPROBS
from headway.engine.state.masks import Masks
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import mask_logits, process_logits, sample

NO_TOKEN = -1  # for the host, in place of a token that was picked from logits with NaN or +inf
SCORED_AT_ONCE = 64  # tokens: what lies between logits and log-probabilities then stays small


def pick_tokens(
    logits: torch.Tensor,  # [rows, window, vocab]
    rows: RowTensors,
    positions: torch.Tensor,  # [rows] int64: of the token picked at window place 0
    window_tokens: torch.Tensor,  # [rows, n] int64: after those in the rows' counts; place 0 sees n - window + 1
    *,
    masks: Masks | None = None,
    keeps_logits: bool = False,
    out: torch.Tensor | None = None,
    broken: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window] int64: the tokens at positions + 0, 1, .. of each row.

    A function of logits, parameters, masks, seed, position and the tokens before it only. masks: of the same rows, applied last;
    without keeps_logits they are written into the logits. broken: [rows, window] bool, written: whether any logit is NaN or
    +inf, so that no probabilities exist.
    """
    raw = logits
    if rows.adjustments is not None:
        logits = process_logits(logits, window_tokens, positions, rows.adjustments)
    if masks is not None:
        if keeps_logits and logits is raw:
            logits = raw.clone()
        mask_logits(logits, masks.entries, masks.allowed)
    parameters = rows.temperatures, rows.top_k, rows.top_p, rows.min_p, rows.seeds
    return sample(logits, positions, *parameters, out=out, broken=broken)


def score_tokens(
    logits: torch.Tensor,  # [n, vocab], raw
    tokens: torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """[n, 2 + 2 * top] float32, top = MAX_LOGPROBS or the vocabulary if that is less.

    A token's log-probability, its rank (1 + the number of tokens above it), the ids of the top tokens and
    their log-probabilities. All in one tensor: float32 holds ids up to 2^24 exactly.
    """
    parts = zip(torch.split(logits, SCORED_AT_ONCE), torch.split(tokens, SCORED_AT_ONCE), strict=True)
    return torch.cat([_score(some, their_tokens) for some, their_tokens in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.to(dtype).log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(1, keepdim=True) + 1
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=1)
    return torch.cat([part.float() for part in (own, rank, top.indices, top.values)], 1)
