"""Counters of the engine, written by the loop, sent as snapshots; the API process turns them into metrics.

All counters only rise while the engine process lives; gauges say what holds now.
"""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, kw_only=True):
    """One snapshot. Mutable: the loop is its only writer.

    Per-position lists are indexed by draft position - 1 and have max depth entries.
    A draft counts for position i only if it was valid there (within the row's limit and depth cap).
    """

    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_kv_blocks: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks_cached: int = 0
    # counters
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    draft_tokens_per_position: list[int] = []
    accepted_tokens_per_position: list[int] = []
    rounds_by_depth: dict[int, int] = {}
    row_rounds_by_emitted_tokens: dict[int, int] = {}
    num_preemptions: int = 0
    finished_by_reason: dict[str, int] = {}
