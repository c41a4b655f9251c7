"""gather_ranks gives every rank what all ranks have, bit by bit, whatever the sizes and however far a rank is
ahead."""

from __future__ import annotations

import pytest
import torch
from headway_testing.rank_memory import PART_BYTES, check_gathers
from torch import multiprocessing

from headway.kernels import RankMemory


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_rank_gets_all_parts_in_their_order(size: int) -> None:
    num_bytes = RankMemory.bytes_of(size, PART_BYTES)
    memories = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    multiprocessing.start_processes(check_gathers, (memories,), nprocs=size, start_method="spawn")
