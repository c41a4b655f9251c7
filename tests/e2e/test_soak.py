"""A small soak of a real server, and what a soak finds fault with. `make soak` is the long one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import httpx
import pytest
from headway_testing.bring_up import ROUNDS_OF_EACH_KIND, bring_up_rounds, falling_rows
from headway_testing.daemon import Server, running_server
from headway_testing.soak import (
    ADMIN_KEY,
    GROWTH_BYTES_PER_REQUEST,
    NUM_PROBES,
    NUM_STRETCHES,
    SERVER_ENVIRONMENT,
    SERVER_FLAGS,
    Rounds,
    Stretch,
    acceptance_length,
    checks_of,
    probe_of,
    random_asks,
    soak,
)

from headway.engine.execution.step_key import row_counts

# 95 blocks: the prefixes of a stretch of eight requests and its probe take more by the end.
KV_CACHE = ("--kv-cache-memory", "12MiB")
GOOD = Stretch(
    outcomes={"200": 2000, "left": 500}, rounds=Rounds(60_000, 30_000), probe=Rounds(5640, 2980), num_aborted=480,
    num_server_errors=0, num_blocks_used=0, num_rows_used=0, num_rounds_launched=0, api_bytes=100 << 20,
    engine_bytes=500 << 20, engine_file_bytes=300 << 20, device_bytes=9 << 30,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    yield from running_server(*SERVER_FLAGS, *KV_CACHE, environment=SERVER_ENVIRONMENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_requests", "num_stretches"), [(32, 4), pytest.param(192, NUM_STRETCHES, marks=pytest.mark.long)]
)
def test_requests_of_every_kind_leave_nothing_behind(
    server: Server, num_requests: int, num_stretches: int
) -> None:
    sizes = {"num_requests": num_requests, "num_stretches": num_stretches}
    stretches = list(soak(server, **sizes, concurrency=16, num_processes=1))
    num_asks = num_requests // num_stretches
    num_probes = len(list(probe_of(list(random_asks(num_asks)))))
    assert len(stretches) == num_stretches
    assert all(sum(stretch.outcomes.values()) == num_asks + num_probes for stretch in stretches)
    assert all(stretch.outcomes["left"] > 0 for stretch in stretches)
    missed = [check for check in checks_of(stretches) if not check.is_met]
    assert not missed, missed
    total, cached = (server.metric("headway_kv_cache_blocks", state=state) for state in ("total", "cached"))
    assert cached > 0.7 * total  # what was granted to spare, and not reached, holds nothing
    # On a CPU rounding is always the same; a preempted request has its next token of its prompt, of no round.
    preemptions = server.metric("headway_preemptions_total")
    tokens, rounds = zip(*((s.probe.num_tokens, s.probe.num_row_rounds) for s in stretches), strict=True)
    assert max(tokens) - min(tokens) <= preemptions
    assert max(rounds) - min(rounds) <= preemptions


def limit_drafts(server: Server, most: int | None) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    body = {"max_draft_tokens": most}
    httpx.put(f"{server.url}/v1/speculation", json=body, headers=headers).raise_for_status()


@pytest.mark.long
def test_drafts_that_are_right_less_often_are_found(server: Server) -> None:
    """Those of the last stretches: they may draft one token, where they drafted up to three."""
    stretches: list[Stretch] = []
    for stretch in soak(server, num_requests=64, concurrency=16, num_processes=1):
        stretches.append(stretch)
        if len(stretches) == NUM_STRETCHES // 2:
            limit_drafts(server, 1)
    limit_drafts(server, None)
    missed = [check.name for check in checks_of(stretches) if not check.is_met]
    assert missed == ["drift of the acceptance length"]
    assert acceptance_length([stretches[0].probe]) > 1.2 * acceptance_length([stretches[-1].probe])


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
        ({"num_rounds_launched": 33}, "kinds of rounds that came late"),
        ({"probe": Rounds(5770, 2980)}, "drift of the acceptance length"),
    ],
    ids=["answer", "5xx", "blocks", "rows", "api", "engine", "gpu", "rounds", "drift"],
)
def test_what_goes_wrong_late_is_found(change: dict[str, object], complaint: str) -> None:
    """In the last stretch of eight, of 2,500 requests each."""
    late = dataclasses.replace(GOOD, **change)  # type: ignore[arg-type]
    missed = [check.name for check in checks_of([GOOD] * 7 + [late]) if not check.is_met]
    assert len(missed) == 1
    assert missed[0].startswith(complaint)


def test_rounds_that_are_captured_late_may_take_their_memory() -> None:
    three_more = dataclasses.replace(GOOD, num_rounds_launched=3, engine_bytes=(500 << 20) + (15 << 20))
    stretches = [GOOD] * 7 + [three_more]
    assert all(check.is_met for check in checks_of(stretches, graph_bytes=2 << 20))
    missed = [check.name for check in checks_of(stretches, graph_bytes=1 << 20) if not check.is_met]
    assert missed == ["growth of the engine process, bytes"]


def test_clients_that_leave_too_late_are_no_test_of_leaving() -> None:
    idle = dataclasses.replace(GOOD, num_aborted=200)
    missed = [check.name for check in checks_of([idle] * NUM_STRETCHES) if not check.is_met]
    assert missed == ["share of left requests that ended otherwise"]


def test_drafts_are_judged_by_the_probe_alone() -> None:
    """Those of other requests end when their clients happen to leave."""
    luckier = dataclasses.replace(GOOD, rounds=Rounds(66_000, 30_000))
    assert all(check.is_met for check in checks_of([GOOD] * 4 + [luckier] * 4))


def test_of_the_probe_none_is_left_and_none_stops_at_a_string() -> None:
    asks = list(random_asks(2500))
    probe = list(probe_of(asks))
    assert len(probe) == NUM_PROBES
    assert not any(ask.is_left or "stop" in ask.body for ask in probe)
    assert any("stop" in ask.body for ask in asks)


def test_a_fifth_of_the_requests_is_left_and_every_field_is_used() -> None:
    asks = list(random_asks(2500))
    assert 0.17 < sum(ask.is_left for ask in asks) / len(asks) < 0.23
    fields = {name for ask in asks for name in ask.body}
    assert len(fields) == 24


@pytest.mark.slow
def test_rows_are_brought_up_together_and_end_one_after_the_other(server: Server) -> None:
    """Three kinds of rounds of 4, 3, 2 and 1 rows, three of each, the first token of each row before them."""
    before = [server.metric("headway_spec_decode_depth_bucket", le=depth) for depth in ("0.0", "1.0")]
    bring_up_rounds(server, ADMIN_KEY, max_rows=4, max_depth=1)
    after = [server.metric("headway_spec_decode_depth_bucket", le=depth) for depth in ("0.0", "1.0")]
    num_rounds, num_deeper = after[0] - before[0], after[1] - before[1]
    assert num_rounds == 3 * 4 * ROUNDS_OF_EACH_KIND
    assert num_rounds < num_deeper - num_rounds <= 2 * num_rounds


@pytest.mark.parametrize("max_rows", [1, 7, 64, 130, 256])
def test_rounds_of_every_graph_are_brought_up(max_rows: int) -> None:
    def padded(rows: int) -> int:
        return next(size for size in row_counts(256) if size >= rows)

    assert {padded(rows) for rows in falling_rows(max_rows)} == {padded(n + 1) for n in range(max_rows)}
