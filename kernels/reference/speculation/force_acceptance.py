"""Forces an acceptance rate for measurements: overwrites sampled tokens so that drafts are accepted at that
rate (PyTorch twin)."""

from __future__ import annotations

import torch

# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), its constants as signed integers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR, _SECOND_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def force_acceptance(
    sampled: torch.Tensor,  # [rows, depth + 1] int64, in place: all places but the last
    tokens: torch.Tensor,  # [rows, depth + 1] int64: a token, then the drafts
    is_valid: torch.Tensor,  # [rows, depth + 1] bool: of the same
    seeds: torch.Tensor,  # [rows] int64
    start_positions: torch.Tensor,  # [rows] int64: of the token before the drafts
    thresholds: torch.Tensor,  # [depth or more] int64, 0 .. 2^32
    vocab_size: int,
) -> None:
    """Accepts draft i if those before it were accepted and the random word of (seed, its position) is below
    thresholds[i].

    Accepted drafts are written to sampled. Where a draft is not accepted, a sampled token equal to it becomes
    the next id. Where there is no valid draft, sampled tokens stay.
    """
    drafts, own = tokens[:, 1:], sampled[:, :-1]
    depth = drafts.shape[1]
    positions = start_positions[:, None] + torch.arange(1, depth + 1, device=sampled.device)
    is_drawn = _random_words(seeds[:, None], positions) < thresholds[:depth]
    is_accepted = is_drawn.cumprod(dim=1) > 0
    rejecting = torch.where(own == drafts, (drafts + 1) % vocab_size, own)
    own.copy_(torch.where(is_valid[:, 1:], torch.where(is_accepted, drafts, rejecting), own))


def _random_words(
    seeds: torch.Tensor,  # int64, broadcast with positions
    positions: torch.Tensor,  # int64
) -> torch.Tensor:
    """Returns a pseudo-random function of (seed, position), int64 in [0, 2^32)."""
    state = seeds + positions * _STEP
    state = (state ^ _shifted(state, 30)) * _FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * _SECOND_FACTOR
    return _shifted(state ^ _shifted(state, 31), 32)


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the state, logically shifted to the right."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
