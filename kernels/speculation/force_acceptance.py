"""Forces an acceptance rate for measurements: overwrites sampled tokens so that drafts are accepted at that
rate.

It is one small launch, so that a round takes as long as without forced acceptance.
"""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.force_acceptance import force_acceptance as force_acceptance_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl

_ROWS, _WARPS = 32, 1


@jit
def _random_word(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns a word of SplitMix64. Its constants are signed integers, and shifts are masked to be
    logical."""
    state = seed + position * -7046029254386353131
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    state = state ^ ((state >> 31) & 0x1FFFFFFFF)
    return (state >> 32) & 0xFFFFFFFF


@jit
def _force_kernel(
    picked_ptr: tl.tensor,
    token_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    start_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab_size: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    seed = tl.load(seed_ptr + row, mask=is_row, other=0)
    start = tl.load(start_ptr + row, mask=is_row, other=0)
    is_accepted = is_row
    for place in tl.static_range(DEPTH):
        cell = row * (DEPTH + 1) + place
        draft = tl.load(token_ptr + cell + 1, mask=is_row, other=0)
        own = tl.load(picked_ptr + cell, mask=is_row, other=0)
        is_valid = tl.load(valid_ptr + cell + 1, mask=is_row, other=0) != 0
        is_accepted = is_accepted & (_random_word(seed, start + place + 1) < tl.load(threshold_ptr + place))
        rejecting = tl.where(own == draft, (draft + 1) % vocab_size, own)
        tl.store(picked_ptr + cell, tl.where(is_accepted, draft, rejecting), mask=is_valid)


@falls_back_to(force_acceptance_twin)
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

    Accepted drafts are written to sampled; the twin explains the other tokens.
    """
    check_dense(sampled, tokens, is_valid, seeds, start_positions, thresholds)
    num_rows, width = sampled.shape
    if num_rows > 0:
        _force_kernel[(blocks_of(num_rows, _ROWS),)](
            sampled, tokens, is_valid, seeds, start_positions, thresholds, num_rows, vocab_size,
            DEPTH=width - 1, ROWS=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
