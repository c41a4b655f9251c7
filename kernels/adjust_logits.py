"""Penalties, bias and masks at every place of a window, as if its tokens had come one by one.

The twin runs on every device: it synchronises nothing on CUDA, so that a graph can capture it.
"""

from __future__ import annotations

import torch

from headway.kernels._adjustments import Adjustments
from headway.kernels.reference.adjust_logits import adjust_logits as adjust_logits_twin
from headway.kernels.reference.adjust_logits import count_tokens as count_tokens_twin


def adjust_logits(
    logits: torch.Tensor,  # [rows, window, vocab] float
    window_tokens: torch.Tensor,  # [rows, n] int64, n >= window - 1: tokens after those that are counted
    positions: torch.Tensor,  # [rows] int64: absolute position of the token picked at window place 0
    adjustments: Adjustments,
) -> torch.Tensor:
    """[rows, window, vocab] float32 or float64: penalties, then bias, then masks."""
    return adjust_logits_twin(logits, window_tokens, positions, adjustments)


def count_tokens(
    tokens: torch.Tensor,  # [rows, n] int64
    counts: torch.Tensor,  # [rows] int64, 0 .. n
    adjustments: Adjustments,
) -> None:
    """The first counts[row] tokens of each row are output from now on."""
    count_tokens_twin(tokens, counts, adjustments)
