"""The last quarter of an hour, one point a second, for the live page and the log's statistics line.

Rates are differences between two readings; acceptance, depths and latencies cover a longer time, because a
single second has few of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from headway.engine import EngineStats

POINT_SECONDS = 1.0
NUM_POINTS = 900
ACCEPTANCE_SECONDS = 10.0
LAST_MINUTE_SECONDS = 60.0
STATISTICS_SECONDS = 10.0
QUANTILES = (0.5, 0.95, 0.99)

# Cumulative as in Prometheus: (upper bound, number of observations up to it); the last bound is infinity.
Buckets = list[tuple[float, float]]

logger = logging.getLogger("headway.server")


class Point(msgspec.Struct, array_like=True, frozen=True):
    """One second. A value is None if there was nothing to measure. Latencies: seconds at each of QUANTILES.

    depth: the mean over rounds. depth_shares: the shares of the last seconds' rounds by depth, from 0 up;
    empty without rounds. acceptance_length: tokens a row got in a round. speedup: of the last minute, by the
    engine's estimate.
    """

    time_unix: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    num_running: int
    num_waiting: int
    kv_cache_usage_ratio: float
    depth: float | None
    depth_shares: list[float]
    acceptance_length: float | None
    speedup: float | None
    acceptance_per_position: list[float | None]
    time_to_first_token: list[float | None]
    time_per_output_token: list[float | None]
    chunk_gap: list[float | None]
    end_to_end: list[float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment. seconds: monotonic time."""

    seconds: float
    stats: EngineStats
    latencies: Mapping[str, Buckets]


@dataclass(frozen=True, slots=True)
class Recent:
    """The difference of two readings. The counters only rise, so every difference is 0 or more."""

    old: Reading
    new: Reading

    @property
    def tokens_per_second(self) -> float:
        return self._per_second(self.new.stats.num_generation_tokens - self.old.stats.num_generation_tokens)

    @property
    def prompt_tokens_per_second(self) -> float:
        return self._per_second(self.new.stats.num_prompt_tokens - self.old.stats.num_prompt_tokens)

    @property
    def acceptance_ratio(self) -> float | None:
        old, new = self.old.stats, self.new.stats
        return _ratio(
            new.num_accepted_tokens - old.num_accepted_tokens, new.num_draft_tokens - old.num_draft_tokens
        )

    @property
    def acceptance_per_position(self) -> list[float | None]:
        old, new = self.old.stats, self.new.stats
        drafted = _risen(old.draft_tokens_per_position, new.draft_tokens_per_position)
        accepted = _risen(old.accepted_tokens_per_position, new.accepted_tokens_per_position)
        return [_ratio(a, d) for a, d in zip(accepted, drafted, strict=True)]

    @property
    def acceptance_length(self) -> float | None:
        old, new = self.old.stats, self.new.stats
        return _mean(old.row_rounds_by_emitted_tokens, new.row_rounds_by_emitted_tokens)

    @property
    def depth(self) -> float | None:
        return _mean(self.old.stats.rounds_by_depth, self.new.stats.rounds_by_depth)

    @property
    def depth_shares(self) -> list[float]:
        """Returns the share of the rounds with each depth, up to the greatest depth of any round; empty
        without rounds."""
        risen = _difference(self.old.stats.rounds_by_depth, self.new.stats.rounds_by_depth)
        total = sum(risen.values())
        return [risen.get(depth, 0) / total for depth in range(max(risen) + 1)] if total else []

    @property
    def speedup(self) -> float | None:
        """Returns the estimated time of the tokens without drafts over their time."""
        old, new = self.old.stats, self.new.stats
        seconds = new.round_seconds - old.round_seconds
        return (new.undrafted_seconds - old.undrafted_seconds) / seconds if seconds > 0 else None

    def quantiles(self, name: str) -> list[float | None]:
        old = self.old.latencies.get(name) or [(bound, 0.0) for bound, _ in self.new.latencies[name]]
        buckets = [
            (bound, count - past)
            for (bound, count), (_, past) in zip(self.new.latencies[name], old, strict=True)
        ]
        return [quantile(buckets, share) for share in QUANTILES]

    def _per_second(self, amount: int) -> float:
        return amount / max(1e-9, self.new.seconds - self.old.seconds)


class History:
    """Mutable: `run` is its only writer."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_latencies: Callable[[], Mapping[str, Buckets]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_stats = read_stats
        self._read_latencies = read_latencies
        self._clock = clock
        self._readings: deque[Reading] = deque(maxlen=int(LAST_MINUTE_SECONDS / POINT_SECONDS) + 1)
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)

    async def run(self) -> None:
        """Runs until it is cancelled: adds a point each second, and logs a line every ten seconds in which
        anything ran."""
        self._read()
        told = self._readings[-1]
        while True:
            await asyncio.sleep(POINT_SECONDS)
            self.add_point(time.time())
            newest = self._readings[-1]
            if newest.seconds - told.seconds >= STATISTICS_SECONDS - POINT_SECONDS / 2:
                _log_statistics(Recent(told, newest))
                told = newest

    def add_point(self, time_unix: float) -> None:
        self._read()
        new = self._readings[-1]
        last = Recent(self._readings[-2] if len(self._readings) > 1 else new, new)
        acceptance, last_minute = self.recent(ACCEPTANCE_SECONDS), self.recent(LAST_MINUTE_SECONDS)
        self._points.append(
            Point(
                time_unix=round(time_unix, 3),
                tokens_per_second=last.tokens_per_second,
                prompt_tokens_per_second=last.prompt_tokens_per_second,
                num_running=new.stats.num_requests_running,
                num_waiting=new.stats.num_requests_waiting,
                kv_cache_usage_ratio=kv_cache_usage(new.stats),
                depth=last.depth,
                depth_shares=acceptance.depth_shares,
                acceptance_length=acceptance.acceptance_length,
                speedup=last_minute.speedup,
                acceptance_per_position=acceptance.acceptance_per_position,
                time_to_first_token=last_minute.quantiles("time_to_first_token"),
                time_per_output_token=last_minute.quantiles("time_per_output_token"),
                chunk_gap=last_minute.quantiles("chunk_gap"),
                end_to_end=last_minute.quantiles("end_to_end"),
            )
        )

    def points_after(self, time_unix: float) -> list[Point]:
        return [point for point in self._points if point.time_unix > time_unix]

    def recent(self, seconds: float) -> Recent:
        """Returns the difference between the newest reading and the oldest one that is at most this old."""
        if not self._readings:
            empty = Reading(0.0, EngineStats(), {})
            return Recent(empty, empty)
        new = self._readings[-1]
        limit = new.seconds - seconds - POINT_SECONDS / 2
        return Recent(next(reading for reading in self._readings if reading.seconds >= limit), new)

    def _read(self) -> None:
        self._readings.append(Reading(self._clock(), self._read_stats(), self._read_latencies()))


def quantile(buckets: Buckets, share: float) -> float | None:
    """Returns a quantile like PromQL's histogram_quantile: linear within a bucket; beyond the last finite
    bound, that bound.

    [(1, 2), (2, 4), (inf, 4)] at 0.75: the third of four lies in the middle of (1, 2] -> 1.5.
    """
    total = buckets[-1][1]
    if not total:
        return None
    rank = share * total
    for (low, below), (high, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank and count > below:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (count - below)
    raise AssertionError(f"counts fall: {buckets}")


def _log_statistics(recent: Recent) -> None:
    """Logs a line, unless nothing runs."""
    stats = recent.new.stats
    is_idle = not stats.num_requests_running and not stats.num_requests_waiting
    if is_idle and stats.num_steps == recent.old.stats.num_steps:
        return
    fields = {
        "tokens_per_second": round(recent.tokens_per_second, 1),
        "prompt_tokens_per_second": round(recent.prompt_tokens_per_second, 1),
        "num_requests_running": stats.num_requests_running,
        "num_requests_waiting": stats.num_requests_waiting,
        "kv_cache_usage_ratio": round(kv_cache_usage(stats), 4),
        "acceptance_ratio": _rounded(recent.acceptance_ratio),
        "acceptance_length": _rounded(recent.acceptance_length),
        "depth": _rounded(recent.depth),
        "estimated_speedup": _rounded(recent.speedup),
    }
    told = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
    logger.info("%s", told, extra={"fields": fields})


def kv_cache_usage(stats: EngineStats) -> float:
    """Returns the share of all blocks that requests own."""
    return stats.num_kv_blocks_used / max(1, stats.num_kv_blocks)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _risen(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """Returns the increases. An engine that has just started has longer lists than none."""
    return [count - past for count, past in zip(new, [*old, *[0] * len(new)], strict=False)]


def _mean(old: Mapping[int, int], new: Mapping[int, int]) -> float | None:
    """Returns the mean of the values counted by {value: count} between the readings."""
    risen = _difference(old, new)
    return _ratio(sum(value * count for value, count in risen.items()), sum(risen.values()))


def _difference(old: Mapping[int, int], new: Mapping[int, int]) -> dict[int, int]:
    return {value: count - old.get(value, 0) for value, count in new.items()}
