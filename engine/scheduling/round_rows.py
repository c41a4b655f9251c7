"""Notes on the requests that take part in a planned round what it may do before its result is read. Knows ids
and numbers."""

from __future__ import annotations

from headway.engine.scheduling.plan import MAX_PENDING, row_of
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler_state import SchedulerState


def join_round(state: SchedulerState, decoding: list[Request]) -> tuple[int, tuple[int | None, ...]]:
    """Returns (depth, request ids by row up to the last row that takes part). No row drafts deeper than it
    may."""
    if not decoding:
        return state.depth, ()
    by_row = {row_of(request): request for request in decoding}
    depth = max(map(state.depth_cap, decoding))
    for request in decoding:
        request.num_rounds_in_flight += 1
        request.num_tokens_in_flight += depth + 1
    if not state.num_audits:
        state.stats.count_round(depth)
    return depth, tuple(by_row[row].request_id if row in by_row else None for row in range(max(by_row) + 1))


def is_late(state: SchedulerState, decoding: list[Request], depth: int) -> bool:
    """Returns whether the drafter has to catch up before a round of that depth. A round with drafts has room
    for as many pending pairs of a row as a round of the full depth leaves. A round without drafts adds one
    pair to those that are pending."""
    most = state.max_depth + 1 if depth > 0 else MAX_PENDING - 1
    return state.has_late_slots and any(request.num_pending > most for request in decoding)


def count_pending(state: SchedulerState, decoding: list[Request], depth: int) -> bool:
    """Notes what the round leaves to the drafter; returns whether the drafter has to catch up before the
    round."""
    if not state.has_late_slots:
        return False
    catches_up = is_late(state, decoding, depth)
    for request in decoding:
        before = 1 if catches_up else request.num_pending
        request.num_pending = depth + 1 if depth > 0 else before + 1
    return catches_up
