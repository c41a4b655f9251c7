"""Gathers the results of ranks (PyTorch twin)."""

from __future__ import annotations

import time

import torch

from headway.kernels.types._rank_memory import MAX_PROGRAMS, RankMemory


def gather_ranks(
    x: torch.Tensor,  # [tokens, n], of this rank
    memory: RankMemory,
) -> torch.Tensor:
    """Returns the results of all ranks in the order of ranks, [tokens, ranks * n]. It waits for them."""
    own = x.contiguous().view(torch.uint8)
    rows = memory.part_bytes // max(own.shape[1], 1)
    return torch.cat([_gather_piece(piece, memory) for piece in torch.split(own, rows)]).view(x.dtype)


def _gather_piece(own: torch.Tensor, memory: RankMemory) -> torch.Tensor:
    size, part_bytes = memory.size, memory.part_bytes
    number = int(memory.counts[0]) + 1
    flags = size * MAX_PROGRAMS * 8
    half = flags + number % 2 * size * part_bytes
    start = half + memory.rank * part_bytes
    for target in memory.memories:
        target[start : start + own.numel()] = own.flatten()
        target[:flags].view(torch.int64).view(size, MAX_PROGRAMS)[memory.rank] = number
    mine = memory.memories[memory.rank]
    while bool(mine[:flags].view(torch.int64).min() < number):
        time.sleep(0)
    memory.counts[0] = number
    starts = (half + rank * part_bytes for rank in range(size))
    return torch.cat([mine[first : first + own.numel()].view(own.shape) for first in starts], dim=1)
