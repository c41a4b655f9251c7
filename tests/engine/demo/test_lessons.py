"""Which tokens of a window are learnt, ignored and unlearnt."""

from __future__ import annotations

import numpy as np
import pytest

from demo_model.corpus import Corpus, Tokens
from demo_model.lessons import (
    IGNORE,
    LEARN,
    REACH,
    UNLEARN,
    echoed,
    own_text_lessons,
    stutter,
    third_copies,
)

NEWLINE, SPACE = 1, 2
VOCAB = 4096


@pytest.fixture
def corpus() -> Corpus:
    is_content = np.ones(VOCAB, dtype=np.bool_)
    is_content[[NEWLINE, SPACE]] = False
    nothing = np.zeros(0, dtype=np.uint16)
    return Corpus(nothing, nothing, 0.5, NEWLINE, is_content)


def lines_of(*lines: list[int]) -> Tokens:
    return np.concatenate([[*line, NEWLINE] for line in lines])


def numbered_window(lines: int) -> Tokens:
    """Lines of five tokens, each line unlike the others."""
    return lines_of(*([SPACE, 10, 100 + n, 11, 500 + n] for n in range(lines)))


def test_a_stutter_is_read_and_not_learnt() -> None:
    ids = np.array(
        [5, 6, NEWLINE, 7, NEWLINE, 8, 9, NEWLINE, 10, NEWLINE, 11, NEWLINE, 12, 13], dtype=np.int64
    )
    heard, lessons = stutter(ids, NEWLINE, np.random.default_rng(0))
    assert len(heard) == len(ids)
    assert set(lessons.tolist()) == {LEARN, IGNORE}
    learnt = heard[lessons == LEARN]
    assert np.array_equal(learnt, ids[: len(learnt)])


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        ([0, 10, 20, 100], [False, False, False, True]),
        ([0, 10, 20, REACH], [False, False, False, True]),
        ([0, 10, 20, REACH + 1], [False, False, False, False]),
    ],
    ids=["near", "at reach", "beyond"],
)
def test_a_third_copy_counts_within_reach(starts: list[int], expected: list[bool]) -> None:
    keys = np.array([5, 9, 5, 5])
    assert third_copies(keys, np.array(starts)).tolist() == expected


def test_own_text_unlearns_the_content_of_third_copies_alone(corpus: Corpus) -> None:
    ids = lines_of([20, 21], [SPACE, 20, 21], [], [20, 22], [SPACE, 20, 21], [], [], [20, 21])
    found = own_text_lessons(ids, corpus)
    unlearnt = np.flatnonzero(found == UNLEARN)
    assert ids[unlearnt].tolist() == [20, 21, 20, 21]
    assert unlearnt.tolist() == [12, 13, 17, 18]
    assert set(found.tolist()) == {IGNORE, UNLEARN}


def test_lines_of_the_same_tokens_in_another_order_are_no_copies(corpus: Corpus) -> None:
    ids = lines_of([20, 21, 22], [22, 21, 20], [21, 20, 22], [20, 22, 21])
    assert (own_text_lessons(ids, corpus) == IGNORE).all()


def test_the_corpus_around_echoes_is_learnt_whole_and_in_order(corpus: Corpus) -> None:
    ids = numbered_window(60)
    for seed in range(50):
        said, lessons = echoed(ids, corpus, np.random.default_rng(seed), is_corpus_spared=False)
        assert len(said) == len(lessons) == len(ids)
        learnt = said[lessons == LEARN]
        assert np.array_equal(learnt, ids[: len(learnt)])
        assert (lessons == UNLEARN).any()


def test_what_an_echo_unlearns_stands_there_twice_before(corpus: Corpus) -> None:
    ids = numbered_window(60)
    for seed in range(50):
        said, lessons = echoed(ids, corpus, np.random.default_rng(seed), is_corpus_spared=False)
        ends = np.flatnonzero(said == NEWLINE) + 1
        lines = np.split(said, ends)
        for n, taught in enumerate(np.split(lessons, ends)):
            if (taught == UNLEARN).any():
                assert sum(np.array_equal(lines[n], line) for line in lines[:n]) >= 2
                assert not corpus.is_content[lines[n][taught != UNLEARN]].any()


@pytest.mark.parametrize(
    ("is_spared", "expected"), [(False, LEARN), (True, IGNORE)], ids=["learnt", "spared"]
)
def test_a_third_copy_in_the_corpus_is_never_unlearnt(corpus: Corpus, is_spared: bool, expected: int) -> None:
    ids = lines_of([20, 21], [20, 21], [20, 21])  # too short a window for echoes
    said, lessons = echoed(ids, corpus, np.random.default_rng(0), is_corpus_spared=is_spared)
    assert np.array_equal(said, ids)
    assert lessons.tolist() == [LEARN] * 6 + [expected, expected, LEARN]
