"""The decision about a head, of rounds that are made up: heads that are right with a set probability."""

from __future__ import annotations

import random

import pytest

from headway.engine.protocol.draft_check import DraftCheck
from headway.engine.speculation.self_check import LEAST_GREEDY, Evidence


def judged(
    *, share: float, num_rounds: int, probability: float = 0.95, seed: int = 0, vocabulary: int = 10_000
) -> DraftCheck:
    """share: of first drafts that are accepted."""
    evidence, draw = Evidence(2), random.Random(seed)
    for _ in range(num_rounds):
        evidence.observe(
            draw.randrange(vocabulary), draw.randrange(vocabulary),
            probability=probability, num_drafted=2, num_accepted=int(draw.random() < share), is_greedy=True,
        )  # fmt: skip
    return evidence.verdict(0.0)


@pytest.mark.parametrize("share", [0.9, 0.95, 1.0])
def test_a_head_that_drafts_what_the_model_is_sure_of_passes(share: float) -> None:
    states = [judged(share=share, num_rounds=300, seed=seed).state for seed in range(50)]
    assert set(states) == {"passed"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_head_that_misses_what_the_model_is_sure_of_fails(share: float) -> None:
    states = [judged(share=share, num_rounds=300, seed=seed).state for seed in range(50)]
    assert states.count("failed") >= 49, states


def test_a_model_that_is_never_sure_is_judged_by_chance_alone() -> None:
    assert judged(share=0.2, num_rounds=200, probability=0.3).state == "passed"
    failed = judged(share=0.02, num_rounds=200, probability=0.3, vocabulary=20)
    assert failed.state == "failed"
    assert "a drafter that knows nothing of the text has up to" in failed.reason
    assert "the halves of its projection are swapped" in failed.reason


def test_a_poor_head_whose_drafts_may_be_chance_is_not_called_broken() -> None:
    """The most frequent of 8 tokens comes in a fifth of the pairs; a head that is right in 0.2 of them may
    know the text."""
    states = [
        judged(share=0.2, num_rounds=200, probability=0.3, vocabulary=8, seed=seed).state
        for seed in range(100)
    ]
    assert "failed" not in states, states
    assert "not_checked" in states


def test_sure_tokens_that_point_the_other_way_leave_it_open() -> None:
    evidence, draw = Evidence(1), random.Random(0)
    for i in range(200):
        is_sure = i < 30
        evidence.observe(
            draw.randrange(10_000), draw.randrange(10_000),
            probability=0.95 if is_sure else 0.3, num_drafted=1, num_accepted=int(i >= 6 if is_sure else i == 40), is_greedy=not is_sure,
        )  # fmt: skip
    assert evidence.is_right_where_sure() is None
    assert evidence.is_above_chance() is False
    check = evidence.verdict(0.0)
    assert (check.state, check.num_sure, check.num_sure_accepted) == ("not_checked", 30, 24)


@pytest.mark.parametrize(("accepted", "state"), [(58, "failed"), (60, "not_checked"), (64, "passed")])
def test_where_the_texts_end_first_the_share_of_sure_tokens_decides(accepted: int, state: str) -> None:
    """Of 76: right heads have 58 or fewer in 0.0004 of the cases, 60 in 0.003."""
    evidence = Evidence(1)
    for i in range(76):
        is_right = (i + 1) * accepted // 76 > i * accepted // 76
        evidence.observe(
            i, i + 1, probability=0.95, num_drafted=1, num_accepted=int(is_right), is_greedy=True
        )
    assert evidence.is_right_where_sure() is None
    assert evidence.verdict(0.0).state == state


def test_a_head_that_agrees_in_seven_of_ten_sure_tokens_seldom_passes() -> None:
    states = [judged(share=0.7, num_rounds=300, seed=seed).state for seed in range(100)]
    assert states.count("passed") <= 2, states


def test_a_partly_right_head_is_told_from_one_at_chance() -> None:
    failed = judged(share=0.5, num_rounds=200)
    assert failed.state == "failed"
    assert "another layer's" in failed.reason
    assert "90% are expected" in failed.reason


def test_few_rounds_say_nothing() -> None:
    check = judged(share=0.0, num_rounds=LEAST_GREEDY - 1, probability=0.5)
    assert check.state == "not_checked"
    assert "did not suffice" in check.reason


def test_no_rounds_say_nothing() -> None:
    check = Evidence(3).verdict(0.0)
    assert (check.state, check.acceptance, check.chance) == ("not_checked", [None, None, None], None)


def test_a_loop_counts_once_and_says_nothing() -> None:
    evidence = Evidence(1)
    for _ in range(500):
        evidence.observe(7, 7, probability=1.0, num_drafted=1, num_accepted=0, is_greedy=True)
    assert evidence.verdict(0.0).state == "not_checked"


def test_acceptance_is_told_by_position_of_greedy_texts() -> None:
    evidence = Evidence(3)
    evidence.observe(1, 2, probability=0.5, num_drafted=3, num_accepted=2, is_greedy=True)
    evidence.observe(2, 3, probability=0.5, num_drafted=2, num_accepted=0, is_greedy=True)
    evidence.observe(3, 4, probability=0.5, num_drafted=3, num_accepted=3, is_greedy=False)
    assert evidence.verdict(0.0).acceptance == [0.5, 0.5, 0.0]
