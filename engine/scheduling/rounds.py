"""Plans decode rounds: the depth, the requests that take part, whether the drafter catches up before, and the
masked rows.

Knows ids and numbers; the masks are filled between the halves of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import GuidedWindow, MaskBuffer, MaskFiller
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import RequestError
from headway.engine.scheduling.depth.costs import RoundLoad
from headway.engine.scheduling.plan import MAX_PENDING, Plan, PrefillChunk, row_of
from headway.engine.scheduling.prefill_policy import MIXED_STEP
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler_state import SchedulerState


class RoundDepth:
    """Mutable: writes the depth of the scheduler's state. is_fixed: rounds are reported to the policy, but it
    does not choose their depth."""

    def __init__(self, state: SchedulerState, config: EngineConfig) -> None:
        self._state = state
        self._chooses = config.chooses_depth
        self._has_graphs = config.device == "cuda"
        self.is_fixed = False

    def choose(self, num_prompt_tokens: int) -> None:
        """Sets the depth of the next round where the policy chooses it. num_prompt_tokens: the prompt tokens
        that may share its pass."""
        state = self._state
        if state.depth_policy is None or not self._chooses or self.is_fixed:
            return
        decoding = [request for request in state.running if state.can_decode(request)]
        if not decoding or state.num_audits:
            return
        depths: Sequence[int] = range(state.depth_limit + 1)
        if self._has_graphs and not state.is_plain():
            # Graphs of rare kinds are captured while requests run, so that few depths are used for them.
            depths = sorted({0, state.depth_limit})
        load = RoundLoad(
            len(decoding),
            _num_context_tokens(decoding),
            num_prompt_tokens,
            is_late=is_late(state, decoding, max(depths)),
        )
        state.depth = state.depth_policy.choose(load, depths)

    def begin_round(self, decoding: list[Request], chunks: list[PrefillChunk]) -> RoundLoad | None:
        """Reports a planned round with these chunks to the policy. Returns its load, or None without a
        policy."""
        if self._state.depth_policy is None or not decoding or self._state.num_audits:
            return None
        self._state.depth_policy.begin_round(self._state.depth)
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        padded = -(-num_prompt_tokens // MIXED_STEP) * MIXED_STEP
        is_usual = self._state.is_plain() and all(request.guide is None for request in decoding)
        return RoundLoad(len(decoding), _num_context_tokens(decoding), padded, is_usual)

    def begin(self, request: Request) -> None:
        """Gives the request a record of its drafts. It takes part in rounds from the next step on."""
        policy = self._state.depth_policy
        if policy is None or request.is_audit:
            return
        if request.draft_record is None:
            temperature, cap = request.sampling.temperature, self._state.own_cap(request)
            request.draft_record = policy.record(temperature, is_masked=request.guide is not None, cap=cap)
        request.draft_record.join()


def _num_context_tokens(decoding: list[Request]) -> int:
    return sum([request.num_computed for request in decoding])


def join_round(state: SchedulerState, decoding: list[Request]) -> tuple[int, tuple[int | None, ...]]:
    """Returns the depth of the round, and the request ids by row up to the last row that takes part. A row
    drafts no deeper than its own limit."""
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
    """Returns whether the drafter has to catch up before a round of that depth. A round with drafts can
    process the pending pairs that one round of full depth leaves to a row. A round without drafts adds one
    pending pair."""
    most = state.max_depth + 1 if depth > 0 else MAX_PENDING - 1
    return state.has_late_slots and any(request.num_pending > most for request in decoding)


def count_pending(state: SchedulerState, decoding: list[Request], depth: int) -> bool:
    """Updates the numbers of tokens that wait for the drafter. Returns whether it has to catch up before the
    round."""
    if not state.has_late_slots:
        return False
    catches_up = is_late(state, decoding, depth)
    for request in decoding:
        before = 1 if catches_up else request.num_pending
        request.num_pending = depth + 1 if depth > 0 else before + 1
    return catches_up


class Masking:
    """Mutable: ends requests whose grammar allows no further token, and counts masked rows."""

    def __init__(self, state: SchedulerState, filler: MaskFiller, *, vocab_size: int) -> None:
        self._state = state
        self._filler = filler
        self._vocab_size = vocab_size

    def fill(self, plan: Plan, drafts: Sequence[Sequence[int]], buffer: MaskBuffer) -> dict[int, int]:
        """Fills the buffer for the step, once the results of all steps before it were read. Returns the entry
        of each masked row; rows whose requests have ended meanwhile are not masked.

        drafts: the drafts of each row of the round; those beyond a row's own limit may have any value.
        """
        windows: list[GuidedWindow] = []
        entries: dict[int, int] = {}
        owners: dict[Guide, Request] = {}
        for row, request_id in _guided_rows(plan):
            request = self._state.requests.get(request_id)
            if request is None or request.guide is None:
                continue
            proposed = drafts[row] if row < len(drafts) and plan.decode_request_ids[row] is not None else ()
            entries[row] = len(windows)
            windows.append(GuidedWindow(request.guide, self._known(proposed), len(windows)))
            owners[request.guide] = request
        for guide, error in self._filler.fill(windows, buffer):
            self._state.contain(_raise, owners[guide], error)
        if not self._state.num_audits:
            self._state.stats.num_masked_rows += len(windows)
        return entries

    def _known(self, drafts: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, drafts))


def _guided_rows(plan: Plan) -> list[tuple[int, int]]:
    """Returns (row, request id) of each row of the plan whose next tokens a grammar restricts."""
    by_row = {row: i for row, i in enumerate(plan.decode_request_ids) if i is not None}
    by_row |= {chunk.row: chunk.request_id for chunk in plan.prefill if chunk.is_last}
    return [(row, by_row[row]) for row in plan.guided_rows]


def _raise(request: Request, error: RequestError) -> None:
    raise error
