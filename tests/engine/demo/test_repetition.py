"""The second stage of training penalises the right tokens, and makes a model that repeats itself stop."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.engine.demo import model, repetition

DEMO = Path(model.__file__).parent
NEWLINE, SPACE, VOCAB = 0, 1, 8
NATS = (0.0, 1.0, 10.0)
RULE = repetition.LineRule(
    NEWLINE,
    torch.arange(VOCAB) == NEWLINE,
    torch.arange(VOCAB) == SPACE,
    16,
    torch.tensor(NATS),
    torch.randint(repetition.MAX_KEY, (64,), generator=torch.Generator().manual_seed(0)),
)
TINY = model.ModelConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


def slow_penalties(ids: list[int], at: int) -> list[float]:
    """The rule for one position, line by line.  # [VOCAB]"""
    earlier: list[list[tuple[int, int]]] = []  # complete lines: (token, place)
    line: list[tuple[int, int]] = []
    for place, token in enumerate(ids[:at]):
        if token != SPACE or line:
            line.append((token, place))
        if token == NEWLINE:
            earlier += [line] if len(line) > 1 else []
            line = []
    begun = [token for token, _ in line]
    going_on = [
        (whole[len(begun)], [t for t, _ in whole])
        for whole in earlier
        if [t for t, _ in whole[: len(begun)]] == begun
    ]
    near = [(token, place, whole) for (token, place), whole in going_on if at - place <= RULE.window]
    before = begin_of_the_line_before(ids[:at])
    penalties = [0.0] * VOCAB
    was_known = bool(begun) and len({tuple(whole) for _, _, whole in near}) == 1
    for token in range(VOCAB):
        copies = [(place, tuple(whole)) for t, place, whole in near if t == token]
        follows = [
            before is not None
            and before >= at - place
            and ids[before:at] == ids[before - (at - place) : place]
            for place, _ in copies
        ]
        count = len(copies) + sum(follows)
        is_late = was_known and (count < 2 or token == NEWLINE)
        if len({whole for _, whole in copies}) == 1 and not is_late:
            penalties[token] = NATS[min(count, len(NATS) - 1)]
    return penalties


def begin_of_the_line_before(ids: list[int]) -> int | None:
    """Where the last complete line that is not blank begins."""
    begins = [0, *(i + 1 for i, token in enumerate(ids) if token == NEWLINE)]
    lines = [(begin, ids[begin:end]) for begin, end in itertools.pairwise(begins)]
    full = [begin for begin, line in lines if not set(line) <= {NEWLINE, SPACE}]
    return full[-1] if full else None


@pytest.mark.parametrize("vocab", [4, 5], ids=["few tokens", "more tokens"])
def test_the_rule_penalises_what_it_says(vocab: int) -> None:
    ids = torch.from_numpy(np.random.default_rng(vocab).integers(vocab, size=(40, 48)))
    found = RULE.penalties(ids, 8)
    wanted = torch.tensor([[slow_penalties(row, at) for at in range(8, 48)] for row in ids.tolist()])
    assert {0.0, 1.0, 10.0} == set(wanted.unique().tolist())
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def rule_at_the_end(ids: list[int]) -> Tensor:
    """The penalties of the token after these.  # [VOCAB]"""
    return RULE.penalties(torch.tensor([[*ids, NEWLINE]]), len(ids))[0, 0]


def test_indentation_is_no_part_of_a_line() -> None:
    assert rule_at_the_end([3, 4, NEWLINE, SPACE, 3, 4, NEWLINE, SPACE, SPACE])[3] == 10.0


def test_a_blank_line_may_stand_there_often() -> None:
    assert not rule_at_the_end([NEWLINE, NEWLINE, SPACE, NEWLINE, NEWLINE]).any()


def test_only_the_token_that_gives_the_line_away_is_penalised() -> None:
    two_lines = [3, 4, 5, NEWLINE, 3, 4, 6, NEWLINE]
    assert not rule_at_the_end(two_lines).any()
    assert not rule_at_the_end([*two_lines, 3]).any()
    assert rule_at_the_end([*two_lines, 3, 4]).nonzero().flatten().tolist() == [5, 6]
    assert not rule_at_the_end([*two_lines, 3, 4, 5]).any()


def test_a_copy_that_follows_a_copied_line_counts_twice() -> None:
    lines = [3, 4, NEWLINE, 5, 6, NEWLINE, 7, NEWLINE]
    assert rule_at_the_end([*lines, 3, 4, NEWLINE])[5] == 10.0
    assert rule_at_the_end([*lines, 2, NEWLINE])[5] == 1.0
