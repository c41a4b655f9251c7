"""propose_ngram against a statement of what it promises of each row, in plain lists."""

import random
from dataclasses import replace

import pytest
import torch
from headway_testing.ngrams import expected_drafts, predicted_drafts
from headway_testing.round_rows import random_rows

from headway.kernels import Predictions, RowState, propose_ngram

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


def predictions_of(
    texts: list[list[int]], starts: list[int], width: int, max_ngram: int, device: torch.device
) -> Predictions:
    """Their tokens lie by state id, in another order than the rows; behind them there is rubbish."""
    state_ids = list(range(len(texts)))[::-1]
    token_ids = torch.full((len(texts), width), 1, dtype=torch.int32)
    for text, state_id in zip(texts, state_ids, strict=True):
        token_ids[state_id, : len(text)] = torch.tensor(text)
    numbers = (torch.tensor(of, device=device) for of in (state_ids, [len(t) for t in texts], starts))
    return Predictions(token_ids.to(device), *numbers, max_ngram)


def check_predicted(
    sequences: list[list[int] | None],
    texts: list[list[int]],
    starts: list[int],
    depth: int,
    device: torch.device,
    width: int = 96,
) -> None:
    rows, cache = rows_of(sequences, 16, device, depth)
    predictions = predictions_of(texts, starts, width, 8, device)
    drafts = propose_ngram(rows, cache, depth, 4, predictions)
    assert drafts.tolist() == [
        predicted_drafts(tokens, start, text, depth, 4, 8) if tokens else [0] * depth
        for tokens, text, start in zip(sequences, texts, starts, strict=True)
    ]


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("num_ids", [1, 2, 5, 40])
def test_random_rows_with_predictions(num_ids: int, depth: int, device: torch.device) -> None:
    draw = random.Random(num_ids)
    sequences: list[list[int] | None] = [
        [draw.randrange(num_ids) for _ in range(draw.randint(1, 70))] for _ in range(20)
    ]
    sequences[7] = None
    texts = [[draw.randrange(num_ids) for _ in range(draw.choice((0, 1, 2, 30, 90)))] for _ in range(20)]
    for i in range(0, 20, 4):  # one token of what the row has is another in what it was predicted to be
        texts[i] = [*(sequences[i] or []), *texts[i]][:90]
        if texts[i]:
            texts[i][draw.randrange(len(texts[i]))] = num_ids
    starts = [draw.randrange(len(tokens or [0])) for tokens in sequences]
    check_predicted(sequences, texts, starts, depth, device)


@pytest.mark.parametrize("place", [3, 4095, 4096, 8190])
def test_a_place_anywhere_in_a_long_prediction(place: int, device: torch.device) -> None:
    text = list(range(9000))
    text[place : place + 2] = [20_001, 20_002]
    check_predicted([[5, 20_001, 20_002]], [text], [1], 4, device, width=9100)


def test_of_equal_occurrences_the_nearest_to_the_place_reached(device: torch.device) -> None:
    text = [1, 2, 9, 1, 3, 9, 1, 4, 9, 1, 5]
    check_predicted([[7, 8, *text[:7]]], [text], [2], 1, device)
    rows, cache = rows_of([[7, 8, 0, 0, 0, 0, 0, 0, 1]], 16, device)
    assert propose_ngram(rows, cache, 2, 4, predictions_of([text], [2], 20, 8, device)).tolist() == [[4, 9]]
