"""Samples tokens for rows of the table, and scores them, by kernels."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from headway.engine.scheduling.limits import MAX_LOGPROBS
from headway.engine.state.masks import Masks
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import mask_logits, process_logits, sample

NO_TOKEN = -1  # for the host, in place of a token that was sampled from logits with NaN or +inf
_ALIGNED = 4  # elements of float32 in 16 bytes
SCORED_AT_ONCE = 64  # tokens, so that the memory between logits and log-probabilities stays small


def pick_tokens(
    logits: torch.Tensor,  # [rows, window, vocab]
    rows: RowTensors,
    positions: torch.Tensor,  # [rows] int64: of the token sampled at window index 0
    window_tokens: torch.Tensor,  # [rows, n] int64: after those in the rows' counts; place 0 sees n - window + 1
    *,
    masks: Masks | None = None,
    keeps_logits: bool = False,
    out: torch.Tensor | None = None,
    broken: torch.Tensor | None = None,
) -> torch.Tensor:
    """Samples tokens. Returns [rows, window] int64: those at positions + 0, 1, .. of each row.

    A token depends only on logits, parameters, masks, seed, position and the tokens before it. So rows
    without logits processors are sampled from their raw logits even if others have some, since processed
    logits have another dtype. masks: those of the same rows, applied last; without keeps_logits they are
    written into the logits. broken: [rows, window] bool, set where any logit is NaN or +inf, so that no
    probabilities exist.
    """
    processed = None
    if rows.processors is not None:
        processed = process_logits(logits, window_tokens, positions, rows.processors)
    if masks is not None:
        logits = logits.clone() if keeps_logits else logits
        mask_logits(logits, masks.entries, masks.allowed)
    parameters = positions, rows.temperatures, rows.top_k, rows.top_p, rows.min_p, rows.seeds
    if processed is None or rows.processors is None:
        return sample(logits, *parameters, out=out, broken=broken)
    if masks is not None:
        mask_logits(processed, masks.entries, masks.allowed)
    if processed.dtype == logits.dtype:
        return sample(processed, *parameters, out=out, broken=broken)
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device) if out is None else out
    broken = torch.empty_like(tokens, dtype=torch.bool) if broken is None else broken
    is_used = rows.processors.is_used
    sample(logits, *parameters, out=tokens, broken=broken, only=~is_used)
    return sample(processed, *parameters, out=tokens, broken=broken, only=is_used)


def in_target_vocabulary(
    logits: torch.Tensor,  # [rows, window, draft vocab]
    ids: torch.Tensor,  # [draft vocab] int64: the target's ids of the tokens, in any order
    vocab_size: int,
) -> torch.Tensor:
    """Returns [rows, window, vocab]: the logits at the target's ids, -inf at all others.

    The inputs of `pick_tokens` (noise, penalties, bias, masks, forced tokens) are indexed by the target's
    ids. So a drafter with a vocabulary of its own samples the same tokens as the target, as far as its
    vocabulary allows.
    """
    spread = logits.new_full((*logits.shape[:2], vocab_size), -torch.inf)
    return spread.index_copy_(2, ids, logits)


def score_tokens(
    logits: torch.Tensor,  # [n, vocab], raw
    tokens: torch.Tensor,  # [n] int64
) -> torch.Tensor:
    """Returns [n, 2 + 2 * top] float32, where top is MAX_LOGPROBS or the vocabulary if that is less.

    A line has a token's log-probability, its rank (1 + the number of tokens above it), the ids of the top
    tokens and their log-probabilities. One tensor holds them all, since float32 represents ids up to 2^24
    exactly.
    """
    parts = zip(torch.split(logits, SCORED_AT_ONCE), torch.split(tokens, SCORED_AT_ONCE), strict=True)
    return torch.cat([_score(some, their_tokens) for some, their_tokens in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = _aligned(logits.to(dtype)).log_softmax(-1)[:, : logits.shape[1]]
    own = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > own).sum(1, keepdim=True) + 1
    top = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=1)
    return torch.cat([part.float() for part in (own, rank, top.indices, top.values)], 1)


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Pads lines so that all of them begin at a multiple of 16 bytes. Otherwise CUDA's softmax sums the first
    elements of a line separately, so that results would depend on the index of the line."""
    missing = -logits.shape[1] % _ALIGNED
    return pad(logits, (0, missing), value=-torch.inf) if logits.is_cuda and missing else logits
