"""Ranks as processes that gather through shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from headway.kernels import RankMemory, gather_ranks

PART_BYTES = 4096
SHAPES = [
    (torch.bfloat16, 3, 40),
    (torch.bfloat16, 1, 7),
    (torch.float32, 70, 24),  # of two programs
    (torch.float32, 1, 1024),
    (torch.uint8, 5, 3),
    (torch.int64, 0, 4),
    (torch.bfloat16, 130, 33),  # in three pieces
]


def part(rank: int, number: int) -> torch.Tensor:
    dtype, tokens, row = SHAPES[number % len(SHAPES)]
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(0, 100, (tokens, row), generator=generator).to(dtype)


def check_gathers(rank: int, memories: Sequence[torch.Tensor]) -> None:
    """Gathers everything twice, while the ranks are slow at different times, and compares the results at the
    end."""
    memory = RankMemory.of(tuple(memories), rank, PART_BYTES)
    found = []
    for number in range(2 * len(SHAPES)):
        if number % len(memories) == rank:
            time.sleep(0.02)
        found.append(gather_ranks(part(rank, number), memory))
    for number, gathered in enumerate(found):
        wanted = torch.cat([part(other, number) for other in range(len(memories))], dim=1)
        assert gathered.dtype == wanted.dtype
        assert torch.equal(gathered, wanted), number
