"""Logits to tokens by Gumbel-max with noise that depends on (seed, position, vocabulary id) alone."""

from __future__ import annotations

import torch

from headway.kernels.reference.sample import gumbel_noise as gumbel_noise_twin
from headway.kernels.reference.sample import sample as sample_twin


def gumbel_noise(
    seeds: torch.Tensor,  # [rows] int64
    positions: torch.Tensor,  # [rows] int64
    vocab_size: int,
) -> torch.Tensor:
    """[rows, vocab] float32. Philox key = seed, counter = (id // 4, position, 0), word id % 4."""
    return gumbel_noise_twin(seeds, positions, vocab_size)


def sample(
    logits: torch.Tensor,  # [rows, window, vocab] float
    positions: torch.Tensor,  # [rows] int64: absolute position of the token picked at window place 0
    temperatures: torch.Tensor,  # [rows] float32, 0: greedy
    top_k: torch.Tensor,  # [rows] int64, 0: off
    top_p: torch.Tensor,  # [rows] float32, 1: off
    min_p: torch.Tensor,  # [rows] float32, 0: off
    seeds: torch.Tensor,  # [rows] int64
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, window] int64: argmax(logits / T + noise) over the tokens that the filters keep."""
    return sample_twin(logits, positions, temperatures, top_k, top_p, min_p, seeds, out=out)
