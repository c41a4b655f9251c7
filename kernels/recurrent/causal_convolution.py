"""A depthwise causal convolution followed by SiLU, for the windows of a round and for chunks of prompts."""

from __future__ import annotations

import torch

from headway.kernels.recurrent._spans import searched_spans
from headway.kernels.reference.recurrent.causal_convolution import convolve_chunks as convolve_chunks_twin
from headway.kernels.reference.recurrent.causal_convolution import convolve_windows as convolve_windows_twin
from headway.kernels.runtime._accumulate import wide
from headway.kernels.runtime._device import overlap
from headway.kernels.runtime._triton import (
    blocks_of,
    check_dense,
    jit,
    jit_once_for,
    power_of_two,
    takes_triton,
    tl,
)
from headway.kernels.types._delta_rule import TokenSpans

_CHANNELS = 512
# A program computes several tokens of a prompt, so that it reads the weights once for all of them.
_CHUNK_TOKENS, _CHUNK_CHANNELS = 8, 128


@jit
def _input(
    x_ptr: tl.tensor,
    state_ptr: tl.tensor,
    place: tl.tensor,
    x_stride: tl.tensor,
    is_inside: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Returns the input of each channel at a token of a span or window, or at an earlier one if place is
    negative. x_ptr points to the first token. place may be a column, [n, 1]; then the rest is [n,
    channels]."""
    at = tl.maximum(place, 0).to(tl.int64)
    own = tl.load(x_ptr + at * x_stride, mask=is_inside & (place >= 0), other=0.0)
    before = tl.load(
        state_ptr + tl.minimum(TAPS - 1 + place, TAPS - 2), mask=is_inside & (place < 0), other=0.0
    )
    return tl.where(place >= 0, own, before)


@jit
def _convolved(
    x_ptr: tl.tensor,
    state_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    place: tl.tensor,
    x_stride: tl.tensor,
    is_inside: tl.tensor,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """Returns the result at a token, in float32 or float64, summed from the oldest tap to the newest."""
    value = _input(x_ptr, state_ptr, place - (TAPS - 1), x_stride, is_inside, TAPS)
    total = wide(value) * wide(tl.load(weight_ptr, mask=is_inside, other=0.0))
    for tap in tl.static_range(1, TAPS):
        value = _input(x_ptr, state_ptr, place - (TAPS - 1) + tap, x_stride, is_inside, TAPS)
        total = tl.fma(wide(value), wide(tl.load(weight_ptr + tap, mask=is_inside, other=0.0)), total)
    decay = tl.exp(-tl.abs(total))
    return total * tl.where(total >= 0, 1.0, decay) / (1 + decay)


@jit_once_for("id_ptr", "width", "max_width")
def _windows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    state_ptr: tl.tensor,
    window_ptr: tl.tensor,
    id_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    max_width: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes BLOCK channels of a token."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = channel < channels
    row, place = token // width, token % width
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    state_id = tl.load(id_ptr + row).to(tl.int64)
    first_ptr = x_ptr + row * width * x_stride + channel
    before_ptr = state_ptr + (state_id * channels + channel) * (TAPS - 1)
    result = _convolved(first_ptr, before_ptr, weight_ptr + channel * TAPS, place, x_stride, is_inside, TAPS)
    tl.store(out_ptr + token * channels + channel, result.to(out_ptr.dtype.element_ty), mask=is_inside)
    kept_ptr = window_ptr + ((state_id * max_width + place) * channels + channel) * (TAPS - 1)
    for tap in tl.static_range(TAPS - 1):
        value = _input(first_ptr, before_ptr, place - (TAPS - 2) + tap, x_stride, is_inside, TAPS)
        tl.store(kept_ptr + tap, value, mask=is_inside)


@jit_once_for("id_ptr", "row_ptr", "first_ptr", "length_ptr", "num_spans", "num_tokens")
def _chunks_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    state_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_spans: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    num_tokens: tl.tensor,
    TAPS: tl.constexpr,
    SPANS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Each program computes BLOCK channels of TOKENS tokens; it searches the spans of its tokens."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_channel = channel < channels
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    span = tl.arange(0, SPANS)
    first = tl.load(first_ptr + span, mask=span < num_spans, other=0)[None, :]
    length = tl.load(length_ptr + span, mask=span < num_spans, other=0)[None, :]
    is_own = (token[:, None] >= first) & (token[:, None] < first + length)
    own = tl.max(tl.where(is_own, span[None, :], -1), 1)
    is_token = (token < num_tokens) & (own >= 0)
    at = tl.maximum(own, 0)
    row = tl.load(row_ptr + at, mask=is_token, other=0)
    state_id = tl.load(id_ptr + row, mask=is_token, other=0).to(tl.int64)
    start = tl.load(first_ptr + at, mask=is_token, other=0).to(tl.int64)
    begin_ptr = x_ptr + start[:, None] * x_stride + channel
    before_ptr = state_ptr + (state_id[:, None] * channels + channel) * (TAPS - 1)
    place, is_inside = (token - start)[:, None], is_token[:, None] & is_channel
    result = _convolved(begin_ptr, before_ptr, weight_ptr + channel * TAPS, place, x_stride, is_inside, TAPS)
    to_ptr = out_ptr + token[:, None] * channels + channel
    tl.store(to_ptr, result.to(out_ptr.dtype.element_ty), mask=is_inside)


@jit_once_for("id_ptr", "row_ptr", "first_ptr", "length_ptr")
def _last_inputs_kernel(
    x_ptr: tl.tensor,
    state_ptr: tl.tensor,
    id_ptr: tl.tensor,
    row_ptr: tl.tensor,
    first_ptr: tl.tensor,
    length_ptr: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program stores the last inputs of a span for BLOCK channels, the oldest first: an entry of the
    state is read from a later entry, which has not been overwritten yet."""
    span = tl.program_id(0)
    length = tl.load(length_ptr + span)
    if length > 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        is_inside = channel < channels
        state_id = tl.load(id_ptr + tl.load(row_ptr + span)).to(tl.int64)
        begin_ptr = x_ptr + tl.load(first_ptr + span).to(tl.int64) * x_stride + channel
        own_ptr = state_ptr + (state_id * channels + channel) * (TAPS - 1)
        for tap in tl.static_range(TAPS - 1):
            value = _input(begin_ptr, own_ptr, length - (TAPS - 1) + tap, x_stride, is_inside, TAPS)
            tl.store(own_ptr + tap, value, mask=is_inside)


def convolve_windows(
    x: torch.Tensor,  # [rows * width, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1]: the inputs before each row's window
    windows: torch.Tensor,  # [entries, max_width, channels, taps - 1], written: the inputs up to each token of the window
    state_ids: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Returns [rows * width, channels]. The states are not changed."""
    if not takes_triton(x):
        return convolve_windows_twin(x, weight, states, windows, state_ids)
    check_dense(weight, states, windows, state_ids)
    assert x.stride(1) == 1, x.stride()
    channels, _, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x) > 0:
        block = min(power_of_two(channels), _CHANNELS)
        overlaps, launch = overlap(x.device)
        _windows_kernel[(len(x), blocks_of(channels, block))](
            x, weight, states, windows, state_ids, out, len(x) // len(state_ids), windows.shape[1], channels,
            x.stride(0), TAPS=taps, BLOCK=block, OVERLAPS=overlaps, **launch,
        )  # fmt: skip
    return out


def convolve_chunks(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1], in place: the inputs before each span, then those up to its end
    state_ids: torch.Tensor,  # [rows of the table] int64
    spans: TokenSpans,
) -> torch.Tensor:
    """Returns [tokens, channels]; the rows of tokens in no span are undefined."""
    if not takes_triton(x):
        return convolve_chunks_twin(x, weight, states, state_ids, spans)
    check_dense(weight, states, state_ids, *spans)
    assert x.stride(1) == 1, x.stride()
    channels, _, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_spans = len(spans.rows)
    if len(x) > 0 and num_spans > 0:
        block = min(power_of_two(channels), _CHANNELS)
        overlaps, launch = overlap(x.device)
        where = state_ids, spans.rows, spans.first_tokens, spans.lengths
        wide = min(block, _CHUNK_CHANNELS)
        _chunks_kernel[(blocks_of(len(x), _CHUNK_TOKENS), blocks_of(channels, wide))](
            x, weight, states, *where, out, num_spans, channels, x.stride(0), len(x),
            TAPS=taps, SPANS=searched_spans(state_ids, spans), TOKENS=_CHUNK_TOKENS, BLOCK=wide, OVERLAPS=overlaps, **launch,
        )  # fmt: skip
        # This is another launch, because the first tokens of a span read what it overwrites.
        _last_inputs_kernel[(num_spans, blocks_of(channels, block))](
            x, states, *where, channels, x.stride(0), TAPS=taps, BLOCK=block
        )
    return out
