"""prepare_drafter_inputs_padded against a request-by-request statement of what it promises."""

import itertools
import random

import pytest
import torch
from headway_testing.random_batches import BATCHES

from headway.kernels import prepare_drafter_inputs_padded

RUBBISH = -123_456


def prepared(drafts: list[int], valid: list[int], starts: list[int]) -> tuple[list[int], list[int]]:
    rejected = [0 if n == 0 else n + 1 - kept for n, kept in zip(drafts, valid, strict=True)]
    return [end - 1 - back for end, back in zip(starts[1:], rejected, strict=True)], rejected


@BATCHES
def test_random_batches(batches: int, device: torch.device) -> None:
    draw = random.Random(batches)
    for _ in range(batches):
        dtype = draw.choice([torch.int32, torch.int64])
        requests, padding, depth = draw.choice([0, 1, 7, 40, 200]), draw.choice([0, 0, 3]), draw.randint(1, 8)
        drafts = [draw.choice([0, depth, draw.randint(0, depth)]) for _ in range(requests)]
        valid = [draw.choice([1, n + 1, draw.randint(1, n + 1)]) for n in drafts]
        # Prompts have no drafts and many tokens.
        sizes = [n + 1 if n else draw.randint(1, 30) for n in drafts]
        starts = list(itertools.accumulate(sizes, initial=0))
        exists = len(drafts)
        running = list(itertools.accumulate(drafts))
        given = [running, valid, starts]
        tensors = [torch.tensor(v + [RUBBISH] * padding, dtype=dtype, device=device) for v in given]
        found = prepare_drafter_inputs_padded(*tensors, exists if padding or draw.random() < 0.5 else None)
        expected = prepared(drafts, valid, starts)
        assert tuple(t.tolist() for t in found) == tuple(v + [0] * padding for v in expected)
        assert {t.dtype for t in found} == {dtype}


def test_requests_without_drafts_and_with_all_rejected(device: torch.device) -> None:
    given = [[3, 3, 5], [2, 1, 1], [0, 4, 5, 8]]
    indices, rejected = prepare_drafter_inputs_padded(*(torch.tensor(v, device=device) for v in given))
    assert (indices.tolist(), rejected.tolist()) == ([1, 4, 5], [2, 0, 2])


@pytest.mark.parametrize("num_requests", [0, 2])
def test_requests_that_do_not_exist_are_not_read(num_requests: int, device: torch.device) -> None:
    given = [[1, 2, RUBBISH], [1, 2, RUBBISH], [0, 2, 4, RUBBISH]]
    found = prepare_drafter_inputs_padded(*(torch.tensor(v, device=device) for v in given), num_requests)
    expected = [0, 3, 0][:num_requests], [1, 0, 0][:num_requests]
    assert [t.tolist() for t in found] == [v + [0] * (3 - num_requests) for v in expected]
