"""A causal convolution of each channel by itself, with silu after it: of windows of a round, and of chunks of prompts."""

from __future__ import annotations

import torch

from headway.kernels.reference.recurrent.causal_convolution import convolve_chunks as convolve_chunks_twin
from headway.kernels.reference.recurrent.causal_convolution import convolve_windows as convolve_windows_twin
from headway.kernels.types._delta_rule import TokenSpans


def convolve_windows(
    x: torch.Tensor,  # [rows * width, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1]: the inputs before each row's window
    windows: torch.Tensor,  # [entries, max_width, channels, taps - 1], written: the inputs up to each token of the window
    state_ids: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Returns [rows * width, channels]. The states stay as they are."""
    return convolve_windows_twin(x, weight, states, windows, state_ids)


def convolve_chunks(
    x: torch.Tensor,  # [tokens, channels]
    weight: torch.Tensor,  # [channels, 1, taps]
    states: torch.Tensor,  # [entries, channels, taps - 1], in place: the inputs before each span, then those up to its end
    state_ids: torch.Tensor,  # [rows of the table] int64
    spans: TokenSpans,
) -> torch.Tensor:
    """Returns [tokens, channels], of tokens in no span anything."""
    return convolve_chunks_twin(x, weight, states, state_ids, spans)
