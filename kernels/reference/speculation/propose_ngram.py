"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of a row's last tokens (PyTorch
twin)."""

from __future__ import annotations

import torch

from headway.kernels.types._predictions import Predictions
from headway.kernels.types._row_state import RowState


def propose_ngram(
    rows: RowState,  # read: last_tokens, kv_lengths, limits, granted_block_ids
    token_cache: torch.Tensor,  # [num_blocks, block_size] int32: the ids of the tokens in the KV cache
    num_speculative_tokens: int,
    max_ngram: int,
    predictions: Predictions | None = None,
) -> torch.Tensor:
    """Returns the drafts of each row, [N, S] int64, 0 for padding.

    This is prompt lookup decoding (Saxena, 2023; vLLM's `ngram` method, transformers'
    `prompt_lookup_num_tokens`). The drafts are the tokens after the latest earlier occurrence of the longest
    suffix of the row's tokens t_0 .. t_L, at most max_ngram long, that occurs before. Where they reach t_L,
    they start again after the occurrence, so that periodic text is continued. A row whose last token is new
    gets that token S times. With S = 3 and max_ngram 2:

        t    5 6 7 8 9 5 6      t_L = 6; 5 6 ends at place 1, so that 7 8 9 are the drafts
        t    1 2 1 2            1 2 ends at place 1, L - 1 = 2 tokens follow it: 1 2 1
        t    1 2 3              3 3 3

    predictions (as OpenAI's `prediction`): a row's prediction is searched first, for the longest suffix, at
    most predictions.max_ngram long, that occurs in it before its last token. Of equal matches the one nearest
    to the place of t_L in the row's own text wins, and of two such the later. It provides the drafts unless
    the row itself repeats a longer suffix; beyond its end its last token is drafted.
    """
    lengths, last_tokens = rows.kv_lengths, rows.last_tokens
    is_live = lengths < rows.limits
    lengths = torch.where(is_live, lengths, 0)
    num_rows, block_size = len(lengths), token_cache.shape[1]
    num_blocks = int(lengths.max()) // block_size + 1 if num_rows > 0 else 1
    blocks = rows.granted_block_ids[:, :num_blocks].clamp(min=0)
    tokens = token_cache[blocks].flatten(1).to(torch.int64)
    ends = torch.arange(tokens.shape[1], device=tokens.device)
    # The last token is not in the cache yet. A row of full length may have no block for it.
    tokens = torch.cat([tokens, tokens.new_zeros((num_rows, 1))], dim=1)
    tokens.scatter_(1, lengths[:, None], last_tokens[:, None])

    is_match = ends < lengths[:, None]
    num_matching = torch.zeros_like(tokens[:, :-1])
    for place in range(max_ngram):
        suffix = tokens.gather(1, (lengths - place).clamp(min=0)[:, None])
        is_equal = (tokens[:, :-1] == suffix).roll(place, 1) & (ends >= place)
        is_match = is_match & is_equal
        num_matching += is_match
    found, end = (num_matching * len(ends) + ends).max(1)
    is_found = found >= len(ends)

    period = torch.where(is_found, lengths - end, 1)[:, None]
    places = torch.arange(num_speculative_tokens, device=tokens.device)
    start = torch.where(is_found, end + 1, lengths)[:, None]
    drafts = tokens.gather(1, start + places % period)
    if predictions is not None:
        predicted, matched = _predicted(tokens, lengths, num_speculative_tokens, predictions)
        wins = (matched > 0) & (matched >= found // len(ends))
        drafts = torch.where(wins[:, None], predicted, drafts)
    return drafts * is_live[:, None]


def _predicted(
    tokens: torch.Tensor,  # [N, T] int64: t_0 .. t_L of each row, then others
    lengths: torch.Tensor,  # [N] int64: L
    num_drafts: int,
    predictions: Predictions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the continuation of each prediction, [N, drafts] int64; the number of matching tokens before
    it, [N] int64, 0: no match)."""
    texts = predictions.token_ids[predictions.state_ids].to(torch.int64)
    ends = torch.arange(texts.shape[1], device=texts.device)
    num_matching = torch.zeros_like(texts)
    is_match = ends < predictions.lengths[:, None] - 1
    for back in range(predictions.max_ngram):
        suffix = tokens.gather(1, (lengths - back).clamp(min=0)[:, None])
        is_match = is_match & (texts == suffix).roll(back, 1) & (ends >= back) & (lengths >= back)[:, None]
        num_matching += is_match
    matched = num_matching.amax(1)
    distance = (ends - (lengths - predictions.starts)[:, None]).abs()
    farthest = torch.iinfo(torch.int64).max // (len(ends) + 1) - 1
    distance = torch.where(num_matching == matched[:, None], distance, farthest)
    end = (distance * len(ends) - ends).argmin(1)
    places = end[:, None] + 1 + torch.arange(num_drafts, device=texts.device)
    return texts.gather(1, places.clamp(max=(predictions.lengths - 1).clamp(min=0)[:, None])), matched
