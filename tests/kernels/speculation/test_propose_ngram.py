"""propose_ngram against a statement of what it promises of each row, in plain lists."""

import random
from dataclasses import replace

import pytest
import torch
from headway_testing.ngrams import expected_drafts
from headway_testing.round_rows import random_rows

from headway.kernels import RowState, propose_ngram

RUBBISH = 123_456


def rows_of(
    sequences: list[list[int] | None], block_size: int, device: torch.device, seed: int = 0
) -> tuple[RowState, torch.Tensor]:
    """(rows with these tokens t_0 .. t_L, the cache of t_0 .. t_{L-1}); None: a padding row.

    Blocks of a row are scattered over the cache; all that is not the row's own is rubbish.
    """
    draw = random.Random(seed)
    max_blocks = max(len(s or ()) // block_size + 1 for s in sequences)
    free = list(range(len(sequences) * max_blocks + 3))
    draw.shuffle(free)
    cache = torch.full((len(free), block_size), RUBBISH, dtype=torch.int32)
    table = torch.full((len(sequences), max_blocks), -1)
    for row, tokens in enumerate(sequences):
        for place, token in enumerate((tokens or [])[:-1]):
            if place % block_size == 0:
                table[row, place // block_size] = free.pop()
            cache[table[row, place // block_size], place % block_size] = token
    lengths = torch.tensor([len(s) - 1 if s else 50 for s in sequences], device=device)
    live = torch.tensor([s is not None for s in sequences], device=device)
    rows = replace(
        random_rows(len(sequences), 16, 0, seed, device),
        last_tokens=torch.tensor([s[-1] if s else 9 for s in sequences], device=device),
        kv_lengths=lengths,
        limits=torch.where(live, lengths + 1, lengths),
        granted_block_ids=table.to(device),
    )
    return rows, cache.to(device)


def check(
    sequences: list[list[int] | None], block_size: int, depth: int, max_ngram: int, device: torch.device
) -> None:
    rows, cache = rows_of(sequences, block_size, device, depth)
    drafts = propose_ngram(rows, cache, depth, max_ngram)
    assert drafts.dtype == torch.int64
    expected = [expected_drafts(s, depth, max_ngram) if s else [0] * depth for s in sequences]
    assert drafts.tolist() == expected


def test_the_worked_examples(device: torch.device) -> None:
    rows, cache = rows_of([[5, 6, 7, 8, 9, 5, 6], [1, 2, 1, 2], [1, 2, 3], [4], None], 4, device)
    drafts = [[7, 8, 9], [1, 2, 1], [3, 3, 3], [4, 4, 4], [0, 0, 0]]
    assert propose_ngram(rows, cache, 3, 2).tolist() == drafts


@pytest.mark.parametrize("max_ngram", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 3, 4, 8])
@pytest.mark.parametrize("num_ids", [1, 2, 5, 40])
def test_random_rows(num_ids: int, depth: int, max_ngram: int, device: torch.device) -> None:
    draw = random.Random(num_ids)
    sequences = [[draw.randrange(num_ids) for _ in range(draw.randint(1, 70))] for _ in range(12)]
    check([*sequences[:5], None, *sequences[5:]], 16, depth, max_ngram, device)


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    draw = random.Random(block_size)
    check(
        [[draw.randrange(3) for _ in range(n)] for n in (1, 2, 15, 16, 17, 63, 64, 65)],
        block_size,
        3,
        4,
        device,
    )


@pytest.mark.parametrize("place", [0, 1, 4093, 4094, 4095, 4096, 8190, 8195])
def test_an_occurrence_anywhere_in_a_long_row(place: int, device: torch.device) -> None:
    """The n-gram may lie in any tile of places, or across two."""
    tokens = [*range(9000), 20_001, 20_002, 20_003, 20_004]
    tokens[place : place + 4] = [20_001, 20_002, 20_003, 20_004]
    check([tokens, [7, *tokens]], 16, 4, 4, device)


def test_the_longest_occurrence_wins_over_a_later_one(device: torch.device) -> None:
    early = [1, 2, 3, 4, 50, 51, *range(100, 5200)]
    check([[*early, 3, 4, 60, 61, 1, 2, 3, 4], [*early, 1, 2, 3, 4, 60, 61, 1, 2, 3, 4]], 16, 2, 4, device)


def test_no_rows_and_no_drafts(device: torch.device) -> None:
    rows, cache = rows_of([[1, 2, 1]], 4, device)
    assert propose_ngram(rows, cache, 0, 4).shape == (1, 0)
    none = replace(rows, **{name: getattr(rows, name)[:0] for name in rows.__slots__})
    assert propose_ngram(none, cache, 3, 4).shape == (0, 3)
