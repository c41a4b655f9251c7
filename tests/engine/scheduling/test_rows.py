"""Rows are taken lowest first and kept tight."""

from __future__ import annotations

import pytest

from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.scheduling.plan import RowMove
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.rows import RowTable


def table(max_rows: int, num_requests: int) -> tuple[RowTable, list[Request]]:
    rows = RowTable(max_rows)
    requests = [Request(i, [1], SamplingParams(), max_tokens=1) for i in range(num_requests)]
    for request in requests:
        rows.take(request)
    return rows, requests


def test_the_lowest_free_row_is_taken() -> None:
    rows, requests = table(5, 4)
    assert [r.row for r in requests] == [0, 1, 2, 3]
    rows.release(requests[2])
    rows.release(requests[0])
    late = Request(9, [1], SamplingParams(), max_tokens=1)
    rows.take(late)
    assert (late.row, requests[0].row) == (0, None)


def test_a_full_table_says_so() -> None:
    rows, requests = table(2, 2)
    assert rows.is_full
    rows.release(requests[0])
    assert not rows.is_full


@pytest.mark.parametrize(
    ("ended", "moves"),
    [
        ([], ()),
        ([4], ()),
        ([3, 4], ()),
        ([0], (RowMove(4, 0),)),
        ([0, 4], (RowMove(3, 0),)),
        ([1, 2], (RowMove(4, 1), RowMove(3, 2))),
        ([0, 1, 2, 3], (RowMove(4, 0),)),
        ([0, 1, 2, 3, 4], ()),
    ],
    ids=str,
)
def test_compaction_moves_the_highest_into_the_lowest_hole(
    ended: list[int], moves: tuple[RowMove, ...]
) -> None:
    rows, requests = table(8, 5)
    for number in ended:
        rows.release(requests[number])
    assert rows.compact() == moves
    kept = [r for i, r in enumerate(requests) if i not in ended]
    assert sorted(r.row for r in kept if r.row is not None) == list(range(len(kept)))
    assert rows.compact() == ()


def test_released_rows_are_told_once() -> None:
    rows, requests = table(4, 4)
    rows.release(requests[3])
    rows.release(requests[1])
    assert rows.drain_released() == (3, 1)
    assert rows.drain_released() == ()


def test_taking_or_releasing_twice_is_our_own_bug() -> None:
    rows, requests = table(4, 1)
    with pytest.raises(AssertionError, match="has row 0 already"):
        rows.take(requests[0])
    rows.release(requests[0])
    with pytest.raises(AssertionError, match="has no row"):
        rows.release(requests[0])
