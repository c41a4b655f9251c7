"""Acceptance by position: what rounds of each depth tell, classes, requests that come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headway.engine.scheduling.depth.acceptance import Acceptance, Kind, Record

GREEDY, SAMPLED, MASKED = (
    Kind.of(0.0, is_masked=False),
    Kind.of(0.8, is_masked=False),
    Kind.of(0.0, is_masked=True),
)


def joined(acceptance: Acceptance, count: int, kind: Kind = GREEDY, cap: int = 3) -> list[Record]:
    records = [acceptance.record(kind, cap) for _ in range(count)]
    for record in records:
        record.join()
    return records


def run(
    acceptance: Acceptance,
    rows: Sequence[tuple[Record, Sequence[float]]],
    depth: int,
    num_rounds: int,
    seed: int = 0,
) -> None:
    """rows: with the rates of their drafts, each of those whose predecessor was accepted."""
    chance = random.Random(seed)
    for _ in range(num_rounds):
        for record, rates in rows:
            accepted = 0
            while accepted < depth and chance.random() < rates[accepted]:
                accepted += 1
            record.note(depth, accepted)
        acceptance.end_round()


def test_rates_of_each_position_are_found() -> None:
    acceptance = Acceptance(3)
    rows = [(record, (0.9, 0.5, 0.2)) for record in joined(acceptance, 32)]
    run(acceptance, rows, depth=3, num_rounds=100)
    assert acceptance.expected_accepted() == pytest.approx([0, 32 * 0.9, 32 * 1.35, 32 * 1.44], rel=0.04)


def test_a_shallow_round_tells_nothing_of_how_deeper_positions_differ() -> None:
    acceptance = Acceptance(3)
    rows = [(record, (0.6, 0.3, 0.9)) for record in joined(acceptance, 32)]
    run(acceptance, rows, depth=3, num_rounds=200)
    before = acceptance.expected_accepted()
    run(acceptance, rows, depth=1, num_rounds=200)
    assert acceptance.expected_accepted() == pytest.approx(before, rel=0.1)


def test_positions_that_are_not_reached_move_with_those_that_are() -> None:
    """Text that becomes easy does so at all positions: the deeper ones are tried at once, not one after the
    other."""
    acceptance = Acceptance(3)
    records = joined(acceptance, 32)
    run(acceptance, [(record, (0.3, 0.3, 0.3)) for record in records], depth=3, num_rounds=50)
    run(acceptance, [(record, (0.9, 0.9, 0.9)) for record in records], depth=1, num_rounds=50)
    assert acceptance.expected_accepted()[3] / 32 == pytest.approx(0.9 + 0.81 + 0.73, rel=0.1)


def test_a_few_rounds_of_many_rows_tell_of_a_change_after_a_spell_of_depth_0() -> None:
    acceptance = Acceptance(3)
    records = joined(acceptance, 128)
    run(acceptance, [(record, (0.3,)) for record in records], depth=1, num_rounds=50)
    run(acceptance, [(record, ()) for record in records], depth=0, num_rounds=200)
    assert acceptance.expected_accepted()[1] / 128 == pytest.approx(0.3, abs=0.06), (
        "the spell forgets nothing"
    )
    run(acceptance, [(record, (0.9,)) for record in records], depth=1, num_rounds=2)
    assert acceptance.expected_accepted()[1] / 128 == pytest.approx(0.9, abs=0.06)


def test_a_new_request_begins_as_its_class_is() -> None:
    acceptance = Acceptance(2)
    rows = [(record, (0.9, 0.9)) for record in joined(acceptance, 8, GREEDY, 2)]
    rows += [(record, (0.2, 0.2)) for record in joined(acceptance, 8, SAMPLED, 2)]
    run(acceptance, rows, depth=2, num_rounds=100)
    for record, _ in rows:
        record.leave()
    assert acceptance.expected_accepted() == [0, 0, 0]
    (greedy,) = joined(acceptance, 1, GREEDY, 2)
    assert acceptance.expected_accepted()[1] == pytest.approx(0.9, abs=0.06)
    greedy.leave()
    joined(acceptance, 1, SAMPLED, 2)
    assert acceptance.expected_accepted()[1] == pytest.approx(0.2, abs=0.06)


def test_an_unknown_class_begins_as_the_others_are() -> None:
    acceptance = Acceptance(1)
    run(acceptance, [(record, (0.1,)) for record in joined(acceptance, 8, cap=1)], depth=1, num_rounds=100)
    before = acceptance.expected_accepted()[1]
    joined(acceptance, 1, MASKED, 1)
    assert acceptance.expected_accepted()[1] - before == pytest.approx(0.1, abs=0.06)


def test_temperatures_have_classes() -> None:
    kinds = [Kind.of(t, is_masked=False).temperature_class for t in (0.0, 0.1, 0.5, 0.6, 0.9, 1.0, 2.0)]
    assert kinds == [0, 1, 1, 2, 2, 3, 3]


def test_what_is_left_of_a_mixed_class_is_known_at_once() -> None:
    """All requests of one kind end: the rows that stay were followed one by one."""
    acceptance = Acceptance(2)
    good, bad = joined(acceptance, 16, cap=2), joined(acceptance, 16, cap=2)
    rows = [*((record, (0.9, 0.9)) for record in good), *((record, (0.3, 0.3)) for record in bad)]
    run(acceptance, rows, depth=2, num_rounds=200)
    assert acceptance.expected_accepted()[2] == pytest.approx(16 * 1.71 + 16 * 0.39, rel=0.06)
    for record in bad:
        record.leave()
    assert acceptance.expected_accepted()[2] == pytest.approx(16 * 1.71, rel=0.1)


def test_a_request_that_may_have_fewer_drafts_counts_for_those_alone() -> None:
    acceptance = Acceptance(3)
    joined(acceptance, 1, cap=1)
    joined(acceptance, 1, cap=0)
    one, *deeper = acceptance.expected_accepted()[1:]
    assert one > 0
    assert deeper == [one, one]


def test_a_request_leaves_once() -> None:
    acceptance = Acceptance(1)
    (record,) = joined(acceptance, 1, cap=1)
    record.leave()
    record.leave()
    assert acceptance.expected_accepted() == [0, 0]
    acceptance.record(GREEDY, 1).leave()
    assert acceptance.expected_accepted() == [0, 0], "it never took part"


def test_requests_whose_drafts_are_never_accepted_end_as_others() -> None:
    """Each then lies as far below its class as can be, to the last bit of a number, which rounds to nothing
    for some."""
    for seed in range(100):
        acceptance, chance = Acceptance(3), random.Random(seed)
        records: list[Record] = []
        for _ in range(chance.randint(2, 9)):
            records += joined(acceptance, 1)
            rows = [(record, (0.75, 0.6, 0.5)) for record in records]
            run(acceptance, rows, depth=3, num_rounds=chance.randint(0, 20), seed=seed)
        run(acceptance, [(record, (0.0,)) for record in records], depth=1, num_rounds=700)
        for record in records:
            record.leave()
        joined(acceptance, 2)
        assert 0 < acceptance.expected_accepted()[1] < 2


@pytest.mark.parametrize("returns_first", [0, 1])
def test_requests_that_are_preempted_and_return_are_what_they_were(returns_first: int) -> None:
    acceptance = Acceptance(1)
    records = joined(acceptance, 2, cap=1)
    run(acceptance, [(records[0], (0.75,)), (records[1], (0.25,))], depth=1, num_rounds=400)
    both = acceptance.expected_accepted()[1]
    for record in records:
        record.leave()
    first, second = records[returns_first], records[1 - returns_first]
    first.join()
    alone = acceptance.expected_accepted()[1]
    assert alone > 0.6 if returns_first == 0 else alone < 0.4
    second.join()
    assert acceptance.expected_accepted()[1] == pytest.approx(both, rel=0.12)


def test_a_class_that_is_not_known_begins_as_empty_ones_were() -> None:
    acceptance = Acceptance(1)
    good, bad = joined(acceptance, 2, cap=1)
    run(acceptance, [(good, (0.9,)), (bad, (0.1,))], depth=1, num_rounds=400)
    mean = acceptance.expected_accepted()[1] / 2
    good.leave()
    bad.leave()
    joined(acceptance, 1, MASKED, 1)
    assert acceptance.expected_accepted()[1] == pytest.approx(mean, rel=0.05)
