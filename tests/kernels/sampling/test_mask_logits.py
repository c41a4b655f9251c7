"""mask_logits against a statement of its rule, token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch

from headway.kernels import mask_logits, sample


@pytest.mark.parametrize("vocab_size", [31, 96, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_allowed_is_never_picked(
    device: torch.device, vocab_size: int, dtype: torch.dtype
) -> None:
    chance = random.Random(vocab_size)
    rows, window, num_lines = 5, 3, 2
    lines = [1, -1, 0, 1, -1]
    words = -(-vocab_size // 32)
    allowed = [
        [{i for i in range(vocab_size) if chance.random() < 0.2} for _ in range(4)] for _ in range(num_lines)
    ]
    bits = torch.zeros(num_lines, 4, words, dtype=torch.int64)
    for line, places in enumerate(allowed):
        for place, ids in enumerate(places):
            for i in ids:
                bits[line, place, i // 32] |= 1 << (i % 32)
    packed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).to(device)
    logits = torch.randn(rows, window, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, 1, 3], logits[3, 2, 4] = math.nan, math.inf
    masked = logits.to(device)
    mask_logits(masked, torch.tensor(lines, device=device), packed)
    for row, line in enumerate(lines):
        for place in range(window):
            for token, (before, after) in enumerate(
                zip(logits[row, place].tolist(), masked[row, place].tolist(), strict=True)
            ):
                if not before < math.inf:
                    assert not after < math.inf, (row, place, token)
                else:
                    is_kept = line < 0 or token in allowed[line][place]
                    assert after == (before if is_kept else -math.inf), (row, place, token)


def test_a_line_that_is_broken_is_still_told(device: torch.device) -> None:
    logits = torch.zeros(2, 1, 64, device=device)
    logits[0, 0, 5] = math.nan
    nothing = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)
    mask_logits(logits, torch.tensor([0, -1], device=device), nothing)
    broken = torch.empty(2, 1, dtype=torch.bool, device=device)
    zeros, ones = torch.zeros(2, device=device), torch.ones(2, device=device)
    index = torch.zeros(2, dtype=torch.int64, device=device)
    sample(logits, index, zeros, index, ones, zeros, index, broken=broken)
    assert broken.tolist() == [[True], [False]]
