"""Drafts by prompt lookup: the tokens that followed an earlier occurrence of a row's last tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.propose_ngram import propose_ngram as propose_ngram_twin
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import check_dense, falls_back_to, jit, jit_once_for, power_of_two, tl
from headway.kernels.types._predictions import Predictions
from headway.kernels.types._row_state import RowState

_TOKENS, _WARPS = 4096, 8
_PLACES = 1 << 24  # more than the tokens of a prediction


@jit_once_for("table_stride")
def _propose_kernel(
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    limit_ptr: tl.tensor,
    table_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    predicted_ptr: tl.tensor,
    state_id_ptr: tl.tensor,
    num_predicted_ptr: tl.tensor,
    start_ptr: tl.tensor,
    table_stride: tl.tensor,
    predicted_stride: tl.tensor,
    DEPTH: tl.constexpr,
    DRAFTS: tl.constexpr,
    MAX_NGRAM: tl.constexpr,
    PREDICTED_NGRAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program searches a row's tokens from the last to the first until it finds a whole n-gram, and then
    the row's prediction if PREDICTED_NGRAM is not 0."""
    row = tl.program_id(0).to(tl.int64)
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(length_ptr + row)
    is_live = length < tl.load(limit_ptr + row)
    last = tl.load(last_token_ptr + row)
    table_ptr += row * table_stride

    # The maximum of (number of matching tokens, place), packed in one number; -1: no match.
    best = tl.full((), -1, tl.int64)
    first = tl.where(is_live & (length > 0), (length - 1) // TOKENS * TOKENS, -1)
    while (first >= 0) & (best < (MAX_NGRAM << 32)):
        end = first + tl.arange(0, TOKENS)
        is_match = end < length
        num_matching = tl.zeros((TOKENS,), tl.int64)
        for place in tl.static_range(MAX_NGRAM):
            suffix = last
            if place > 0:
                suffix = _token_at(table_ptr, cache_ptr, length - place, length >= place, BLOCK_SIZE)
            is_match = is_match & (end >= place)
            token = _token_at(table_ptr, cache_ptr, end - place, is_match, BLOCK_SIZE)
            is_match = is_match & (token == suffix)
            num_matching += is_match.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(num_matching > 0, (num_matching << 32) + end, -1)))
        first -= TOKENS

    # The tokens after the match, repeated where they reach the last token.
    is_found = best >= 0
    end = best & 0xFFFFFFFF
    period = tl.where(is_found, length - end, 1)
    draft = tl.arange(0, DRAFTS)
    place = tl.where(is_found, end + 1, length) + draft % period
    token = _token_at(table_ptr, cache_ptr, place, is_live & (place < length), BLOCK_SIZE)
    token = tl.where(place < length, token, last)
    if PREDICTED_NGRAM > 0:
        predicted_ptr += tl.load(state_id_ptr + row) * predicted_stride
        num_predicted = tl.where(is_live, tl.load(num_predicted_ptr + row), 0)
        reached = length - tl.load(start_ptr + row)
        # The maximum of (number of matching tokens, nearness, place), packed in one number; -1: no match.
        nearest = tl.full((), -1, tl.int64)
        first = tl.full((), 0, tl.int64)
        while first < num_predicted - 1:
            at = first + tl.arange(0, TOKENS)
            agrees = at < num_predicted - 1
            num_agreeing = tl.zeros((TOKENS,), tl.int64)
            for back in tl.static_range(PREDICTED_NGRAM):
                suffix = last
                if back > 0:
                    suffix = _token_at(table_ptr, cache_ptr, length - back, length >= back, BLOCK_SIZE)
                agrees = agrees & (at >= back)
                other = tl.load(predicted_ptr + at - back, mask=agrees, other=-1).to(tl.int64)
                agrees = agrees & (other == suffix)
                num_agreeing += agrees.to(tl.int64)
            nearness = PLACES - 1 - tl.minimum(tl.abs(at - reached), PLACES - 1)
            value = (num_agreeing * PLACES + nearness) * PLACES + at
            nearest = tl.maximum(nearest, tl.max(tl.where(num_agreeing > 0, value, -1)))
            first += TOKENS
        place = tl.minimum(nearest % PLACES + 1 + draft, num_predicted - 1)
        is_nearest = (nearest >= 0) & (nearest // (PLACES * PLACES) >= best >> 32)
        other = tl.load(predicted_ptr + place, mask=is_nearest & (place >= 0), other=0).to(tl.int64)
        token = tl.where(is_nearest, other, token)
    tl.store(draft_ptr + row * DEPTH + draft, tl.where(is_live, token, 0), mask=draft < DEPTH)


@jit
def _token_at(
    table_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    place: tl.tensor,
    is_inside: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Returns the row's token at this place, int64; -1 where is_inside is false."""
    block = tl.load(table_ptr + place // BLOCK_SIZE, mask=is_inside, other=0)
    token = tl.load(cache_ptr + block * BLOCK_SIZE + place % BLOCK_SIZE, mask=is_inside, other=-1)
    return token.to(tl.int64)


@falls_back_to(propose_ngram_twin)
def propose_ngram(
    rows: RowState,  # read: last_tokens, kv_lengths, limits, granted_block_ids
    token_cache: torch.Tensor,  # [num_blocks, block_size] int32: the ids of the tokens in the KV cache
    num_speculative_tokens: int,
    max_ngram: int,
    predictions: Predictions | None = None,
) -> torch.Tensor:
    """Returns the drafts of each row, [N, S] int64, 0 for padding.

    The drafts are the tokens after the latest earlier occurrence of the longest suffix of the row's tokens,
    at most max_ngram long, that occurs before. Nothing beyond the row's length is read. The twin explains
    predictions and shows examples.
    """
    table, num_rows = rows.granted_block_ids, len(rows.limits)
    check_dense(rows.last_tokens, rows.kv_lengths, rows.limits, token_cache)
    assert table.stride(1) == 1, table.stride()
    drafts = torch.empty((num_rows, num_speculative_tokens), dtype=torch.int64, device=table.device)
    if drafts.numel() > 0:
        overlaps, launch = overlap(table.device)
        predicted = state_ids = lengths = starts = token_cache
        if predictions is not None:
            predicted, state_ids = predictions.token_ids, predictions.state_ids
            lengths, starts = predictions.lengths, predictions.starts
            check_dense(predicted, state_ids, lengths, starts)
        _propose_kernel[(num_rows,)](
            rows.last_tokens, rows.kv_lengths, rows.limits, table, token_cache, drafts,
            predicted, state_ids, lengths, starts, table.stride(0), predicted.stride(0),
            DEPTH=num_speculative_tokens, DRAFTS=power_of_two(num_speculative_tokens), MAX_NGRAM=max_ngram,
            PREDICTED_NGRAM=0 if predictions is None else predictions.max_ngram,
            BLOCK_SIZE=token_cache.shape[1], TOKENS=_TOKENS, PLACES=_PLACES, OVERLAPS=overlaps, num_warps=_WARPS, **launch,
        )  # fmt: skip
    return drafts
