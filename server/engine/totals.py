"""Counters over all lives of the engine: a restart must not make a Prometheus counter fall."""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeVar

from headway.engine import EngineStats

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


def counters_only(stats: EngineStats) -> EngineStats:
    """The counters of an engine that is gone: nothing runs, waits or lies in memory."""
    return add_counters(stats, EngineStats())


def add_counters(past: EngineStats, now: EngineStats) -> EngineStats:
    """Counters of both, gauges of `now`."""
    return EngineStats(
        num_requests_running=now.num_requests_running,
        num_requests_waiting=now.num_requests_waiting,
        num_kv_blocks=now.num_kv_blocks,
        num_kv_blocks_used=now.num_kv_blocks_used,
        num_kv_blocks_cached=now.num_kv_blocks_cached,
        kv_block_size=now.kv_block_size,
        num_prompt_tokens=past.num_prompt_tokens + now.num_prompt_tokens,
        num_cached_prompt_tokens=past.num_cached_prompt_tokens + now.num_cached_prompt_tokens,
        num_prefix_query_tokens=past.num_prefix_query_tokens + now.num_prefix_query_tokens,
        num_generation_tokens=past.num_generation_tokens + now.num_generation_tokens,
        num_steps=past.num_steps + now.num_steps,
        num_step_tokens=past.num_step_tokens + now.num_step_tokens,
        num_steps_by_tokens=_add_lists(past.num_steps_by_tokens, now.num_steps_by_tokens),
        num_drafts=past.num_drafts + now.num_drafts,
        num_draft_tokens=past.num_draft_tokens + now.num_draft_tokens,
        num_accepted_tokens=past.num_accepted_tokens + now.num_accepted_tokens,
        draft_tokens_per_position=_add_lists(past.draft_tokens_per_position, now.draft_tokens_per_position),
        accepted_tokens_per_position=_add_lists(
            past.accepted_tokens_per_position, now.accepted_tokens_per_position
        ),
        rounds_by_depth=_add_dicts(past.rounds_by_depth, now.rounds_by_depth),
        row_rounds_by_emitted_tokens=_add_dicts(
            past.row_rounds_by_emitted_tokens, now.row_rounds_by_emitted_tokens
        ),
        stage_seconds=_add_dicts(past.stage_seconds, now.stage_seconds),
        round_seconds=past.round_seconds + now.round_seconds,
        undrafted_seconds=past.undrafted_seconds + now.undrafted_seconds,
        num_graph_replays=past.num_graph_replays + now.num_graph_replays,
        num_preemptions=past.num_preemptions + now.num_preemptions,
        num_nan_logits=past.num_nan_logits + now.num_nan_logits,
        num_masked_rows=past.num_masked_rows + now.num_masked_rows,
        num_lossy_requests=past.num_lossy_requests + now.num_lossy_requests,
        finished_by_reason=_add_dicts(past.finished_by_reason, now.finished_by_reason),
        audits_by_outcome=_add_dicts(past.audits_by_outcome, now.audits_by_outcome),
    )


def _add_lists(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(one, other, fillvalue=0)]


def _add_dicts(one: dict[Key, Number], other: dict[Key, Number]) -> dict[Key, Number]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
