"""extend_queries against a request-by-request statement of what it promises."""

import itertools
import random

import torch
from headway_testing.random_batches import BATCHES

from headway.kernels import extend_queries


@BATCHES
def test_random_batches(batches: int, device: torch.device) -> None:
    draw = random.Random(batches)
    for _ in range(batches):
        requests, n = draw.choice([0, 1, 7, 40, 127, 128, 200]), draw.randint(0, 8)
        sizes = [draw.randint(1, 30) for _ in range(requests)]
        lengths = [size + draw.randint(0, 10**6) for size in sizes]
        dtypes = draw.choices([torch.int32, torch.int64], k=2)
        starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=dtypes[0], device=device)
        seq_lens = torch.tensor(lengths, dtype=dtypes[1], device=device)
        given = sum(sizes), max(sizes, default=0), max(lengths, default=0)
        new_starts, new_lengths, *numbers = extend_queries(starts, seq_lens, *given, n)

        longer = [size + n for size in sizes]
        assert new_starts.tolist() == [0, *itertools.accumulate(longer)]
        assert new_lengths.tolist() == [length + n for length in lengths]
        assert numbers == [sum(longer), max(longer, default=n), max(lengths, default=0) + n]
        assert (new_starts.dtype, new_lengths.dtype) == tuple(dtypes)
        assert (starts.tolist(), seq_lens.tolist()) == ([0, *itertools.accumulate(sizes)], lengths)
