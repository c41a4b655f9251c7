"""prepare_next_tokens_padded against a request-by-request statement of what it promises."""

import random

import pytest
import torch
from headway_testing.random_batches import BATCHES

from headway.kernels import prepare_next_tokens_padded

VOCAB = 50


def chosen(sampled: list[int], is_discarded: bool, backup: int) -> tuple[int, int]:
    valid = [token for token in sampled if token != -1 and token < VOCAB]
    return (backup, 0) if is_discarded or not valid else (valid[-1], len(valid))


@BATCHES
def test_random_batches(batches: int, device: torch.device) -> None:
    draw = random.Random(batches)
    for _ in range(batches):
        requests, width = draw.choice([1, 7, 40, 200]), draw.randint(1, 9)
        dtype, backup_dtype = draw.choices([torch.int32, torch.int64], k=2)
        kinds = [VOCAB - 1, 0, VOCAB, VOCAB + 3, -1]
        rows = [
            [draw.choice([draw.choice(kinds), draw.randrange(VOCAB)]) for _ in range(width)]
            for _ in range(requests)
        ]
        # As verification leaves them: kept tokens, then -1.
        for row in rows[::2]:
            kept = draw.randint(0, width)
            row[:] = [draw.randrange(VOCAB) for _ in range(kept)] + [-1] * (width - kept)
        discarded = [draw.random() < 0.2 for _ in rows]
        backup = [draw.randrange(VOCAB) for _ in rows]
        sampled = torch.tensor(rows, dtype=dtype, device=device)
        if draw.random() < 0.5:
            sampled = torch.stack([sampled, sampled * 0 + 7], 2)[:, :, 0]
        tokens, counts = prepare_next_tokens_padded(
            sampled,
            torch.tensor(discarded, device=device),
            torch.tensor(backup, dtype=backup_dtype, device=device),
            VOCAB,
        )
        expected = [chosen(*given) for given in zip(rows, discarded, backup, strict=True)]
        assert list(zip(tokens.tolist(), counts.tolist(), strict=True)) == expected
        assert tokens.dtype == counts.dtype == dtype


@pytest.mark.parametrize(
    ("sampled", "is_discarded", "expected"),
    [
        ([7, 3, -1], False, (3, 2)),
        ([7, -1, 4], False, (4, 2)),
        ([7, VOCAB, VOCAB + 1], False, (7, 1)),
        ([-1, -1, -1], False, (9, 0)),
        ([7, 3, 4], True, (9, 0)),
    ],
    ids=["rejected", "a gap", "beyond the vocabulary", "nothing valid", "discarded"],
)
def test_kinds_of_requests(
    sampled: list[int], is_discarded: bool, expected: tuple[int, int], device: torch.device
) -> None:
    given = torch.tensor([sampled], device=device), torch.tensor([is_discarded], device=device)
    found = prepare_next_tokens_padded(*given, torch.tensor([9], device=device), VOCAB)
    assert tuple(int(t) for t in found) == expected


def test_no_requests(device: torch.device) -> None:
    none = torch.zeros(0, dtype=torch.int64, device=device)
    found = prepare_next_tokens_padded(none.view(0, 4), none.bool(), none, VOCAB)
    assert [t.shape for t in found] == [(0,), (0,)]
