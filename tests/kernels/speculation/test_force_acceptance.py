"""force_acceptance against whole numbers in Python, row by row."""

import pytest
import torch

from headway.kernels import force_acceptance

WORD, VOCABULARY = 1 << 64, 50
CERTAIN = 1 << 32


def random_word(seed: int, position: int) -> int:
    state = (seed + position * 0x9E3779B97F4A7C15) % WORD
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB % WORD
    return (state ^ state >> 31) >> 32


def forced(
    sampled: list[int], tokens: list[int], num_valid: int, seed: int, start: int, thresholds: list[int]
) -> list[int]:
    result, is_accepted = list(sampled), True
    for place, draft in enumerate(tokens[1:num_valid]):
        is_accepted = is_accepted and random_word(seed, start + place + 1) < thresholds[place]
        if is_accepted:
            result[place] = draft
        elif sampled[place] == draft:
            result[place] = (draft + 1) % VOCABULARY
    return result


def check(
    num_rows: int, thresholds: list[int], depth: int, device: torch.device, *, is_cut: bool = False
) -> torch.Tensor:
    """Ids so few that picks often agree with drafts of themselves, the last of the vocabulary among them.
    is_cut: any number of the tokens is valid, from none on."""
    generator = torch.Generator().manual_seed(num_rows)
    shape = (num_rows, depth + 1)
    sampled, tokens = (
        torch.randint(VOCABULARY - 3, VOCABULARY, shape, generator=generator) for _ in range(2)
    )
    seeds = torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator)
    starts = torch.randint(0, 1 << 20, (num_rows,), generator=generator)
    num_valid = torch.randint(0 if is_cut else depth + 1, depth + 2, (num_rows,), generator=generator)
    columns = (t.tolist() for t in (sampled, tokens, num_valid, seeds, starts))
    expected = [forced(*row, thresholds) for row in zip(*columns, strict=True)]
    result = sampled.to(device)
    limits = torch.tensor(thresholds, device=device)
    is_valid = torch.arange(depth + 1) < num_valid[:, None]
    force_acceptance(
        result,
        tokens.to(device),
        is_valid.to(device),
        seeds.to(device),
        starts.to(device),
        limits,
        VOCABULARY,
    )
    assert result.tolist() == expected
    return (result.cpu()[:, :-1] == tokens[:, 1:]).cumprod(1).sum(1)


def test_the_words_are_those_that_were_published() -> None:
    """The first outputs for the seed 1234567, their upper halves."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [random_word(1234567, n) for n in range(1, 5)] == [number >> 32 for number in published]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 31, 33, 200])
def test_rows_are_forced_as_their_words_say(
    num_rows: int, depth: int, device: torch.device, *, is_cut: bool
) -> None:
    thresholds = [int(share * CERTAIN) for share in (0.9, 0.8, 0.7, 0.9, 0.5, 0.9, 0.9, 0.9)]
    check(num_rows, thresholds, depth, device, is_cut=is_cut)


@pytest.mark.parametrize(
    ("thresholds", "accepted"),
    [([0, CERTAIN, CERTAIN], 0), ([CERTAIN, 0, CERTAIN], 1), ([CERTAIN] * 3, 3)],
    ids=["none", "one", "all"],
)
def test_certain_drafts_are_certain(thresholds: list[int], accepted: int, device: torch.device) -> None:
    assert (check(70, thresholds, 3, device) == accepted).all()
