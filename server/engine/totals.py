"""Counters over all lives of the engine: a restart must not make a Prometheus counter fall."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from headway.engine import EngineStats

GAUGES = frozenset((
    "num_requests_running", "num_requests_waiting", "num_kv_blocks", "num_kv_blocks_used", "num_kv_blocks_cached",
    "kv_block_size",
))  # fmt: skip


def counters_only(stats: EngineStats) -> EngineStats:
    """Returns the counters of an engine that is gone, with all gauges at 0."""
    return add_counters(stats, EngineStats())


def add_counters(past: EngineStats, now: EngineStats) -> EngineStats:
    """Returns the counters of both added up, and the gauges of `now`."""
    counters = [name for name in EngineStats.__struct_fields__ if name not in GAUGES]
    sums = {name: _sum(getattr(past, name), getattr(now, name)) for name in counters}
    return msgspec.structs.replace(now, **sums)


def _sum(one: Any, other: Any) -> Any:
    """Adds numbers, and entries of lists and of dictionaries."""
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return one + other
