"""A small soak of a real server, and what a soak finds fault with. `make soak` is the long one."""

from __future__ import annotations

import dataclasses

import pytest
from headway_testing.daemon import start_server, stop_server
from headway_testing.soak import (
    GROWTH_BYTES_PER_REQUEST,
    NUM_STRETCHES,
    Stretch,
    checks_of,
    random_asks,
    soak,
)

# A hundred answers differ by when their clients left.
SMALL_DRIFT = 0.05
GOOD = Stretch(
    outcomes={"200": 2000, "left": 500}, num_tokens=60_000, num_row_rounds=30_000, num_aborted=480,
    num_server_errors=0, num_blocks_used=0, num_rows_used=0, api_bytes=100 << 20, engine_bytes=500 << 20,
    device_bytes=9 << 30, is_cpu=False,
)  # fmt: skip


@pytest.mark.timeout(200)
def test_requests_of_every_kind_leave_nothing_behind() -> None:
    server = start_server("--threads", "1", "--log-level", "warning", "--kv-cache-memory", "300MiB")
    try:
        stretches = list(soak(server, num_requests=240, concurrency=16, num_processes=1))
    finally:
        assert stop_server(server) == 0
    assert len(stretches) == NUM_STRETCHES
    assert all(sum(stretch.outcomes.values()) == 30 for stretch in stretches)
    assert all(stretch.outcomes["left"] > 0 for stretch in stretches)
    missed = [check for check in checks_of(stretches, SMALL_DRIFT) if not check.is_met]
    assert not missed, missed


def test_a_server_that_forgets_nothing_passes() -> None:
    assert all(check.is_met for check in checks_of([GOOD] * NUM_STRETCHES))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"outcomes": {"200": 1999, "left": 500, "status 500": 1}}, "answers that are not 200"),
        ({"num_server_errors": 1}, "5xx"),
        ({"num_blocks_used": 1}, "blocks in use"),
        ({"num_rows_used": 1}, "rows in use"),
        ({"api_bytes": (100 << 20) + 10_001 * GROWTH_BYTES_PER_REQUEST}, "growth of the API process"),
        ({"engine_bytes": (500 << 20) + 10_001 * GROWTH_BYTES_PER_REQUEST}, "growth of the engine process"),
        ({"device_bytes": 10 << 30}, "growth of the GPU"),
        ({"num_tokens": 61_300}, "drift of the acceptance length"),
    ],
    ids=["answer", "5xx", "blocks", "rows", "api", "engine", "gpu", "drift"],
)
def test_what_goes_wrong_late_is_found(change: dict[str, object], complaint: str) -> None:
    """In the last stretch of eight, of 2,500 requests each."""
    late = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    missed = [check.name for check in checks_of([GOOD] * 7 + [late]) if not check.is_met]
    assert len(missed) == 1
    assert missed[0].startswith(complaint)


def test_clients_that_leave_too_late_are_no_test_of_leaving() -> None:
    idle = dataclasses.replace(GOOD, num_aborted=200)
    missed = [check.name for check in checks_of([idle] * NUM_STRETCHES) if not check.is_met]
    assert missed == ["share of left requests that ended otherwise"]


def test_a_fifth_of_the_requests_is_left_and_every_field_is_used() -> None:
    asks = list(random_asks(2500))
    assert 0.17 < sum(ask.is_left for ask in asks) / len(asks) < 0.23
    fields = {name for ask in asks for name in ask.body}
    assert len(fields) == 24
