"""Counters over several lives of the engine."""

from __future__ import annotations

import msgspec

from headway.engine import EngineStats
from headway.server.engine.totals import add_counters, counters_only

GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_kv_blocks", "num_kv_blocks_used", "num_kv_blocks_cached",
    "kv_block_size",
}  # fmt: skip
KINDS: dict[object, object] = {
    int: 5,
    float: 0.25,
    list[int]: [1, 2],
    dict[int, int]: {3: 4},
    dict[str, int]: {"stop": 6},
    dict[str, float]: {"draft": 0.5},
}
DOUBLED: dict[object, object] = {
    int: 10,
    float: 0.5,
    list[int]: [2, 4],
    dict[int, int]: {3: 8},
    dict[str, int]: {"stop": 12},
    dict[str, float]: {"draft": 1.0},
}


def stats() -> EngineStats:
    """A value in every field that there is, also in those added after this test was written."""
    values = {field.name: KINDS[field.type] for field in msgspec.structs.fields(EngineStats)}
    return msgspec.convert(values, EngineStats)


def test_every_counter_adds_up_and_gauges_are_those_of_now() -> None:
    total = add_counters(stats(), stats())
    for field in msgspec.structs.fields(EngineStats):
        expected = KINDS if field.name in GAUGES else DOUBLED
        assert getattr(total, field.name) == expected[field.type], field.name


def test_a_dead_engine_keeps_its_counters_and_loses_its_gauges() -> None:
    past = counters_only(stats())
    for field in msgspec.structs.fields(EngineStats):
        assert getattr(past, field.name) == (0 if field.name in GAUGES else KINDS[field.type]), field.name


def test_lives_with_more_positions_extend_the_lists() -> None:
    total = add_counters(
        EngineStats(draft_tokens_per_position=[1], rounds_by_depth={1: 1}),
        EngineStats(draft_tokens_per_position=[1, 1, 1], rounds_by_depth={3: 1}),
    )
    assert (total.draft_tokens_per_position, total.rounds_by_depth) == ([2, 1, 1], {1: 1, 3: 1})
