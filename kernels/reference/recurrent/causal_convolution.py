"""A depthwise causal convolution followed by SiLU, for the windows of a round and for chunks of prompts
(PyTorch twin).

Sums are in float32 (float64 for float64), from the oldest tap to the newest.
"""

from __future__ import annotations

import torch

from headway.kernels.reference._activations import silu, wide
from headway.kernels.types._delta_rule import TokenSpans


def convolve_windows(
    x: torch.Tensor,  # [rows * width, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1]: the inputs before each row's window
    windows: torch.Tensor,  # [entries, max_width, channels, taps - 1], written: the inputs up to each token of the window
    state_ids: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Returns [rows * width, channels]. The states are not changed."""
    num_rows = len(state_ids)
    if num_rows == 0:
        return x.clone()
    own = x.view(num_rows, -1, x.shape[1])
    inputs = torch.cat([states[state_ids].transpose(1, 2), own], dim=1)
    taps = weight.shape[2]
    windows[state_ids, : own.shape[1]] = inputs[:, 1:].unfold(1, taps - 1, 1)
    return _convolved(inputs, weight).flatten(0, 1)


def convolve_chunks(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1], in place: the inputs before each span, then those up to its end
    state_ids: torch.Tensor,  # [rows of the table] int64
    spans: TokenSpans,
) -> torch.Tensor:
    """Returns [tokens, channels]; the rows of tokens in no span are undefined."""
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    spanned = zip(spans.rows.tolist(), spans.first_tokens.tolist(), spans.lengths.tolist(), strict=True)
    for row, first, length in spanned:
        if length > 0:
            state_id, tokens = state_ids[row], slice(first, first + length)
            inputs = torch.cat([states[state_id].T, x[tokens]])
            out[tokens] = _convolved(inputs, weight)
            states[state_id] = inputs[length:].T
    return out


def _convolved(
    inputs: torch.Tensor,  # [..., taps - 1 + tokens, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
) -> torch.Tensor:  # [..., tokens, channels]
    taps = weight.shape[2]
    count = inputs.shape[-2] - taps + 1
    values, factors = wide(inputs), wide(weight)[:, 0]
    total = values[..., :count, :] * factors[:, 0]
    for tap in range(1, taps):
        total = total + values[..., tap : tap + count, :] * factors[:, tap]
    return silu(total).to(inputs.dtype)
