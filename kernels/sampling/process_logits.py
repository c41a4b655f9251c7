"""The logits processors: penalties, bias and masks at every position of a window, as if its tokens had been
generated one by one."""

from __future__ import annotations

import torch

from headway.kernels.reference.sampling.process_logits import count_tokens as count_tokens_twin
from headway.kernels.reference.sampling.process_logits import process_logits as process_logits_twin
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)
from headway.kernels.types._processor_state import LogitsProcessorState

_TOKENS, _WARPS = 1024, 4
# The twin rounds a product before it is subtracted.
_ADJUST_OPTIONS = {"enable_fp_fusion": False}
_WINDOW = ("window", "num_tokens", "row_stride", "token_stride", "window_token_ptr", "is_used_ptr")
_ROWS = ("position_ptr", "stop_token_ptr", "min_position_ptr", "bad_word_ptr", "recent_token_ptr")
_FORCED = ("forced_position_ptr", "forced_token_ptr", "forced_after_ptr", "token_count_ptr")


@jit_once_for(*_WINDOW, "penalty_ptr")
def _adjust_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window_token_ptr: tl.tensor,
    is_used_ptr: tl.tensor,
    penalty_ptr: tl.tensor,
    token_count_ptr: tl.tensor,
    is_in_prompt_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    window: tl.tensor,
    num_tokens: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    token_stride: tl.tensor,
    TOKENS: tl.constexpr,
) -> None:
    """Each program applies penalties and bias to TOKENS of the vocabulary, at each position of a row."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_there = token < vocab_size
    of_row = row * vocab_size + token
    of_place = row * window * vocab_size + token
    if tl.load(is_used_ptr + row):
        repetition = tl.load(penalty_ptr + 3 * row)
        frequency = tl.load(penalty_ptr + 3 * row + 1)
        presence = tl.load(penalty_ptr + 3 * row + 2)
        count = tl.load(token_count_ptr + of_row, mask=is_there, other=0)
        is_in_prompt = tl.load(is_in_prompt_ptr + of_row, mask=is_there, other=False)
        bias = tl.load(bias_ptr + of_row, mask=is_there, other=0.0)
        for num_counted in range(num_tokens + 1):
            if num_counted > 0:
                counted = tl.load(window_token_ptr + row * row_stride + (num_counted - 1) * token_stride)
                counted = tl.minimum(tl.maximum(counted, 0), vocab_size - 1)
                count += (token == counted).to(tl.int32)
            if num_counted > num_tokens - window:
                place = of_place + (num_counted - (num_tokens - window) - 1) * vocab_size
                value = tl.load(logits_ptr + place, mask=is_there, other=0.0).to(tl.float32)
                repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
                value = tl.where((count > 0) | is_in_prompt, repeated, value)
                value = value - count.to(tl.float32) * frequency - (count > 0).to(tl.float32) * presence
                tl.store(out_ptr + place, value + bias, mask=is_there)
    else:
        for index in range(window):
            place = of_place + index * vocab_size
            value = tl.load(logits_ptr + place, mask=is_there, other=0.0).to(tl.float32)
            tl.store(out_ptr + place, value, mask=is_there)


@jit
def _mask_tokens(out_ptr: tl.tensor, token: tl.tensor, is_masked: tl.tensor) -> None:
    value = tl.load(out_ptr + token, mask=is_masked, other=0.0)
    tl.store(out_ptr + token, -float("inf"), mask=is_masked & (value < float("inf")))


@jit
def _force_token(out_ptr: tl.tensor, forced: tl.tensor, vocab_size: tl.tensor, TOKENS: tl.constexpr) -> None:
    for first in range(0, vocab_size, TOKENS):
        token = first + tl.arange(0, TOKENS)
        value = tl.load(out_ptr + token, mask=token < vocab_size, other=float("inf"))
        tl.store(out_ptr + token, tl.where(token == forced, 0.0, -float("inf")), mask=value < float("inf"))


@jit_once_for(*_WINDOW, *_ROWS, *_FORCED)
def _mask_kernel(
    out_ptr: tl.tensor,
    window_token_ptr: tl.tensor,
    position_ptr: tl.tensor,
    is_used_ptr: tl.tensor,
    stop_token_ptr: tl.tensor,
    min_position_ptr: tl.tensor,
    bad_word_ptr: tl.tensor,
    recent_token_ptr: tl.tensor,
    forced_position_ptr: tl.tensor,
    forced_token_ptr: tl.tensor,
    forced_after_ptr: tl.tensor,
    token_count_ptr: tl.tensor,
    window: tl.tensor,
    num_tokens: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    token_stride: tl.tensor,
    STOPS: tl.constexpr,
    WORDS: tl.constexpr,
    LENGTH: tl.constexpr,
    STOPS_BLOCK: tl.constexpr,
    WORDS_BLOCK: tl.constexpr,
    LENGTH_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Each program masks tokens at one position of a row. NaN and +inf stay, because `sample` detects
    them."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(is_used_ptr + row):
        out_ptr += (row * window + place) * vocab_size
        position, num_before = tl.load(position_ptr + row) + place, num_tokens - window + 1 + place
        is_forced = tl.load(forced_position_ptr + row) == position
        forced = tl.load(forced_token_ptr + row)
        if is_forced:
            after = tl.load(forced_after_ptr + row)
            counts_ptr = token_count_ptr + row * vocab_size
            is_forced = tl.load(counts_ptr + forced) == 0
            has_begun = (after < 0) | (tl.load(counts_ptr + tl.maximum(after, 0)) > 0)
            for index in range(num_before):
                before = tl.load(window_token_ptr + row * row_stride + index * token_stride)
                is_forced &= before != forced
                has_begun |= before == after
            is_forced &= has_begun
        if is_forced:
            _force_token(out_ptr, forced, vocab_size, TOKENS)
        else:
            stop = tl.arange(0, STOPS_BLOCK)
            token = tl.load(stop_token_ptr + row * STOPS + stop, mask=stop < STOPS, other=-1)
            is_early = position < tl.load(min_position_ptr + row)
            _mask_tokens(out_ptr, token, is_early & (token >= 0) & (token < vocab_size))
            # A bad word's last token is masked if its other tokens precede the position.
            ahead = tl.arange(0, LENGTH_BLOCK)
            is_ahead = ahead < LENGTH - 1
            text = num_before + ahead
            recent_token_ptr += row * (LENGTH - 1)
            window_token_ptr += row * row_stride
            is_recent, drafted = text < LENGTH - 1, text - (LENGTH - 1)
            recent = tl.load(recent_token_ptr + text, mask=is_ahead & is_recent, other=-1)
            in_window = is_ahead & (drafted >= 0)
            before = tl.load(window_token_ptr + drafted * token_stride, mask=in_window, other=-1)
            before = tl.where(is_recent, recent, before)
            word = tl.arange(0, WORDS_BLOCK)
            line_ptr = bad_word_ptr + (row * WORDS + word) * LENGTH
            is_line = word < WORDS
            asked = tl.load(
                line_ptr[:, None] + ahead[None, :], mask=is_line[:, None] & is_ahead[None, :], other=-1
            )
            is_missed = (asked >= 0) & (asked != before[None, :])
            last = tl.load(line_ptr + LENGTH - 1, mask=is_line, other=-1)
            is_met = tl.max(is_missed.to(tl.int32), 1) == 0
            _mask_tokens(out_ptr, last, is_met & (last >= 0) & (last < vocab_size))


def process_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float
    window_tokens: torch.Tensor,  # [rows, n] int64, n >= window - 1: tokens after those that are counted
    positions: torch.Tensor,  # [rows] int64: absolute position of the token sampled at window place 0
    processors: LogitsProcessorState,
) -> torch.Tensor:
    """Returns [rows, window, vocab] float32 or float64: the logits with penalties, then bias, then masks and
    forced tokens.

    Allocates only its result. A position with NaN or +inf has NaN or +inf in the result. The twin computes
    float64 logits, which only tests of exactness use, on every device.
    """
    if not takes_triton(logits) or logits.dtype == torch.float64:
        return process_logits_twin(logits, window_tokens, positions, processors)
    check_dense(logits, positions, *processors.tensors().values())
    rows, window, vocab_size = logits.shape
    num_tokens = window_tokens.shape[1]
    assert num_tokens >= window - 1, (num_tokens, window)
    counts = processors.token_counts
    assert counts.shape == (rows, vocab_size), (counts.shape, rows, vocab_size)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    sizes = window, num_tokens, vocab_size, *window_tokens.stride()
    _adjust_kernel[(rows, blocks_of(vocab_size, _TOKENS))](
        logits, out, window_tokens, processors.is_used, processors.penalties, processors.token_counts,
        processors.is_in_prompt, processors.logit_bias, *sizes, TOKENS=_TOKENS, num_warps=_WARPS, **_ADJUST_OPTIONS,
    )  # fmt: skip
    (_, stops), (_, words, length) = processors.stop_token_ids.shape, processors.bad_words.shape
    _mask_kernel[(rows, window)](
        out, window_tokens, positions, processors.is_used, processors.stop_token_ids, processors.min_positions,
        processors.bad_words, processors.recent_tokens, processors.forced_positions, processors.forced_token_ids,
        processors.forced_after_ids, processors.token_counts, *sizes, STOPS=stops, WORDS=words, LENGTH=length,
        STOPS_BLOCK=power_of_two(stops), WORDS_BLOCK=power_of_two(words), LENGTH_BLOCK=power_of_two(length),
        TOKENS=_TOKENS, num_warps=_WARPS,
    )  # fmt: skip
    return out


def count_tokens(
    tokens: torch.Tensor,  # [rows, n] int64
    counts: torch.Tensor,  # [rows] int64, 0 .. n
    processors: LogitsProcessorState,
) -> None:
    """Counts the first counts[row] tokens of each row as output. The twin runs on every device: it does not
    synchronise with the host, so that a CUDA graph can capture it."""
    count_tokens_twin(tokens, counts, processors)
