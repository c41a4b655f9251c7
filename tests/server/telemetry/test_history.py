"""Points of the last minutes are what the counters rose by; quantiles are those of Prometheus."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from headway.engine import EngineStats
from headway.server.telemetry import history as history_module
from headway.server.telemetry.history import NUM_POINTS, History, quantile

INF = float("inf")


class Source:
    """Counters and a clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self.stats = EngineStats(num_kv_blocks=10)
        self.latencies = {
            name: [(1.0, 0.0), (2.0, 0.0), (INF, 0.0)]
            for name in ("time_to_first_token", "time_per_output_token", "chunk_gap", "end_to_end")
        }
        self.history = History(lambda: self.stats, lambda: dict(self.latencies), lambda: self.seconds)

    def after(self, seconds: float, **change: object) -> None:
        self.seconds += seconds
        self.stats = msgspec.structs.replace(self.stats, **change)
        self.history.add_point(self.seconds)


def test_a_point_is_what_the_counters_rose_by() -> None:
    source = Source()
    source.after(
        0, num_generation_tokens=50, draft_tokens_per_position=[10, 10], accepted_tokens_per_position=[9, 1]
    )
    source.after(
        2, num_generation_tokens=80, num_prompt_tokens=10, num_requests_running=3, num_requests_waiting=1,
        num_kv_blocks_used=4, rounds_by_depth={2: 3, 0: 1}, row_rounds_by_emitted_tokens={1: 1, 3: 3},
        draft_tokens_per_position=[20, 18], accepted_tokens_per_position=[14, 5],
    )  # fmt: skip
    source.latencies["chunk_gap"] = [(1.0, 2.0), (2.0, 4.0), (INF, 4.0)]
    source.after(1)
    _, point, last = source.history.points_after(0)
    assert (point.tokens_per_second, point.prompt_tokens_per_second) == (15, 5)
    assert (point.num_running, point.num_waiting, point.kv_cache_usage_ratio) == (3, 1, 0.4)
    assert (point.depth, point.acceptance_length) == (1.5, 2.5)
    assert point.acceptance_per_position == [0.5, 0.5]
    assert (last.tokens_per_second, last.depth) == (0, None)
    assert last.acceptance_per_position == [0.5, 0.5]
    assert point.chunk_gap == [None] * 3
    assert last.chunk_gap == [1.0, 1.9, 1.98]


def test_the_depths_are_shares_of_the_rounds_of_ten_seconds() -> None:
    source = Source()
    source.after(0, rounds_by_depth={3: 7})
    source.after(1, rounds_by_depth={3: 8, 1: 3})
    assert source.history.points_after(100.5)[0].depth_shares == [0, 0.75, 0, 0.25]
    source.after(8, rounds_by_depth={3: 8, 1: 3, 0: 4})
    assert source.history.points_after(108.5)[0].depth_shares == [0.5, 0.375, 0, 0.125]
    source.after(20)
    assert source.history.points_after(128.5)[0].depth_shares == []


def test_the_speedup_is_that_of_the_last_minute() -> None:
    source = Source()
    source.after(0)
    source.after(1, round_seconds=2.0, undrafted_seconds=3.0)
    source.after(40)
    seen = [point.speedup for point in source.history.points_after(0)]
    source.after(61)
    assert [*seen, source.history.points_after(200.5)[0].speedup] == [None, 1.5, 1.5, None]


def test_acceptance_looks_back_ten_seconds_and_latencies_sixty() -> None:
    source = Source()
    source.after(0)
    source.latencies["end_to_end"] = [(1.0, 1.0), (2.0, 1.0), (INF, 1.0)]
    source.after(1, draft_tokens_per_position=[4], accepted_tokens_per_position=[2])
    seen = []
    for _ in range(70):
        source.after(1)
        point = source.history.points_after(source.seconds - 0.5)[0]
        seen.append((point.acceptance_per_position[0] is not None, point.end_to_end[0] is not None))
    assert [sum(column) for column in zip(*seen, strict=True)] == [9, 59]


def test_an_engine_that_starts_anew_brings_positions_that_were_not_there() -> None:
    source = Source()
    source.after(0)
    source.after(1, draft_tokens_per_position=[2, 0], accepted_tokens_per_position=[1, 0])
    assert source.history.points_after(100.5)[0].acceptance_per_position == [0.5, None]


def test_no_more_points_are_kept_than_a_quarter_of_an_hour_has() -> None:
    source = Source()
    for _ in range(NUM_POINTS + 5):
        source.after(1)
    points = source.history.points_after(0)
    assert (len(points), points[0].time_unix) == (900, 106)
    assert len(source.history.points_after(points[-2].time_unix)) == 1


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((2, 4, 4), 0.75, 1.5),
        ((4, 4, 4), 0.5, 0.5),
        ((0, 4, 4), 0.01, 1.01),
        ((0, 0, 4), 0.5, 2.0),
        ((1, 1, 2), 0.5, 1.0),
    ],
    ids=["none", "second-bucket", "first-bucket", "low-share", "beyond-the-last-bound", "edge"],
)
def test_a_quantile_is_linear_within_its_bucket(
    counts: tuple[float, float, float], share: float, expected: float | None
) -> None:
    buckets = list(zip((1.0, 2.0, INF), counts, strict=True))
    assert quantile(buckets, share) == (None if expected is None else pytest.approx(expected))


async def test_a_line_of_statistics_comes_while_something_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history_module, "POINT_SECONDS", 0.001)
    monkeypatch.setattr(history_module, "STATISTICS_SECONDS", 5.0)
    caplog.set_level(logging.INFO, logger="headway.server")
    source = Source()

    async def lines_after(seconds: float, **change: object) -> list[str]:
        caplog.clear()
        source.seconds += seconds
        source.stats = msgspec.structs.replace(source.stats, **change)
        await asyncio.sleep(0.05)
        return [record.getMessage() for record in caplog.records]

    running = asyncio.create_task(source.history.run())
    await asyncio.sleep(0.01)
    assert await lines_after(10) == []
    assert await lines_after(4, num_steps=9, num_generation_tokens=50) == []
    (line,) = await lines_after(6, num_kv_blocks_used=1)
    assert line.startswith("tokens_per_second=5.0 ")
    assert "kv_cache_usage_ratio=0.1" in line
    assert "acceptance" not in line
    assert await lines_after(10) == []
    running.cancel()
