"""The logits processors: penalties, bias and masks at every position of a window, as if its tokens had been
generated one by one (PyTorch twin).

There is no host synchronisation on CUDA. On a CPU only rows that use a processor are changed.
"""

from __future__ import annotations

import torch

from headway.kernels.types._processor_state import LogitsProcessorState


def process_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float
    window_tokens: torch.Tensor,  # [rows, n] int64, n >= window - 1: tokens after those that are counted
    positions: torch.Tensor,  # [rows] int64: absolute position of the token sampled at window place 0
    processors: LogitsProcessorState,
) -> torch.Tensor:
    """Returns [rows, window, vocab] float32 or float64 in new memory; `logits` are not changed.

    The order is: repetition, frequency and presence penalty; bias; -inf for stop tokens before the minimum
    length and for bad words; at a row's forced position 0 for the forced token and -inf for all others,
    unless its output already has that token, or lacks the token that it must follow.

    All of window_tokens count as output at the last position, all but the last one at the position before it,
    and so on: the target's K + 1 positions have K drafts, a drafter's single position has its drafts so far.
    A position with NaN or +inf has NaN or +inf in the result, which `sample` detects.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.is_cuda:
        values = logits.to(wide)
        adjusted = _adjusted(values, window_tokens, positions, processors)
        return torch.where(processors.is_used[:, None, None], adjusted, values)
    index = processors.is_used.nonzero()[:, 0]
    if len(index) == len(logits):
        return _adjusted(logits.to(wide), window_tokens, positions, processors)
    values = logits.to(wide, copy=True)
    if len(index) > 0:
        some = _adjusted(values[index], window_tokens[index], positions[index], processors.at(index))
        values.index_copy_(0, index, some)
    return values


def count_tokens(
    tokens: torch.Tensor,  # [rows, n] int64
    counts: torch.Tensor,  # [rows] int64, 0 .. n
    processors: LogitsProcessorState,
) -> None:
    """Counts the first counts[row] tokens of each row as output."""
    kept = counts * processors.is_used
    places = torch.arange(tokens.shape[1], device=tokens.device)
    is_kept = places < kept[:, None]
    _count(processors.token_counts, tokens, is_kept.to(torch.int32))
    recent = processors.recent_tokens
    places = torch.arange(recent.shape[1], device=tokens.device)
    recent.copy_(torch.cat([recent, tokens], 1).gather(1, places + kept[:, None]))


def _adjusted(
    values: torch.Tensor,
    window_tokens: torch.Tensor,
    positions: torch.Tensor,
    processors: LogitsProcessorState,
) -> torch.Tensor:
    window = values.shape[1]
    penalised = torch.empty_like(values)
    counts = processors.token_counts.clone()
    first = window_tokens.shape[1] - window + 1
    ones = torch.ones_like(window_tokens, dtype=torch.int32)
    _count(counts, window_tokens[:, :first], ones[:, :first])
    for place in range(window):
        if place > 0:
            token = slice(first + place - 1, first + place)
            _count(counts, window_tokens[:, token], ones[:, token])
        penalised[:, place] = _penalised(values[:, place], counts, processors)
    penalised += processors.logit_bias[:, None]
    _mask_stops(penalised, positions, processors)
    _mask_bad_words(penalised, window_tokens, processors)
    _force(penalised, window_tokens, positions, processors)
    return penalised


def _count(counts: torch.Tensor, tokens: torch.Tensor, amounts: torch.Tensor) -> None:
    """Adds the amounts. Tokens are clamped to the vocabulary, because those of padding rows are undefined."""
    counts.scatter_add_(1, tokens.clamp(0, counts.shape[1] - 1), amounts)


def _penalised(values: torch.Tensor, counts: torch.Tensor, processors: LogitsProcessorState) -> torch.Tensor:
    """Returns values, [rows, vocab], with the three penalties."""
    repetition, frequency, presence = processors.penalties[:, :, None].unbind(1)
    is_in_output = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(is_in_output | processors.is_in_prompt, repeated, values)
    return values - counts * frequency - is_in_output * presence


def _mask_stops(values: torch.Tensor, positions: torch.Tensor, processors: LogitsProcessorState) -> None:
    places = torch.arange(values.shape[1], device=values.device)
    is_early = positions[:, None] + places < processors.min_positions[:, None]
    stops = processors.stop_token_ids[:, None].expand(-1, values.shape[1], -1)
    _mask(values, stops, is_early[:, :, None] & (stops >= 0))


def _mask_bad_words(
    values: torch.Tensor, window_tokens: torch.Tensor, processors: LogitsProcessorState
) -> None:
    """Masks the last tokens of bad words. The line -1 3 5 masks 5 if 3 is the preceding token."""
    words, window = processors.bad_words, values.shape[1]
    text = torch.cat([processors.recent_tokens, window_tokens], 1)
    before = text.unfold(1, words.shape[2] - 1, 1)[:, -window:]  # [rows, window, length - 1]
    asked = words[:, None, :, :-1]
    is_met = ((before[:, :, None] == asked) | (asked < 0)).all(-1)
    last = words[:, None, :, -1].expand(-1, window, -1)
    _mask(values, last, is_met & (last >= 0))


def _force(
    values: torch.Tensor,
    window_tokens: torch.Tensor,
    positions: torch.Tensor,
    processors: LogitsProcessorState,
) -> None:
    """Forces tokens at their positions. NaN and +inf stay, as with masks."""
    window, forced, after = values.shape[1], processors.forced_token_ids[:, None], processors.forced_after_ids
    has_forced = _is_in_output(forced, window_tokens, window, processors)
    may_be_forced = (after < 0)[:, None] | _is_in_output(after[:, None], window_tokens, window, processors)
    places = torch.arange(window, device=values.device)
    is_there = positions[:, None] + places == processors.forced_positions[:, None]
    is_forced = is_there & may_be_forced & ~has_forced
    line = torch.full_like(values[:, 0], -torch.inf).scatter_(1, forced, 0)
    is_set = is_forced[:, :, None] & (values < torch.inf)
    values.copy_(torch.where(is_set, line[:, None], values))


def _is_in_output(
    token_ids: torch.Tensor,  # [rows, 1] int64
    window_tokens: torch.Tensor,
    window: int,
    processors: LogitsProcessorState,
) -> torch.Tensor:
    """Returns whether the output has the row's token before each position, [rows, window] bool; undefined for
    negative ids."""
    is_in_window = torch.nn.functional.pad((window_tokens == token_ids).cumsum(1) > 0, (1, 0))[:, -window:]
    return is_in_window | (processors.token_counts.gather(1, token_ids.clamp(min=0)) > 0)


def _mask(values: torch.Tensor, token_ids: torch.Tensor, is_masked: torch.Tensor) -> None:
    """Adds -inf to masked tokens. token_ids, is_masked: [rows, window, n]. Ids may repeat, because the order
    of adding 0 and -inf does not matter."""
    amounts = torch.zeros(token_ids.shape, dtype=values.dtype, device=values.device)
    values.scatter_add_(2, token_ids.clamp(min=0), amounts.masked_fill_(is_masked, -torch.inf))
