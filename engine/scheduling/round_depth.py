"""Asks the depth policy how many drafts the next round has, and tells it of the requests that take part.
Knows ids and numbers."""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine.protocol.config import EngineConfig
from headway.engine.scheduling.depth.costs import RoundLoad
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.scheduling.prefill_policy import MIXED_STEP
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.round_rows import is_late
from headway.engine.scheduling.scheduler_state import SchedulerState


def mixed_depths(config: EngineConfig) -> set[int]:
    """Returns the depths of the rounds that may share their passes with prompts: each has graphs of its own
    for that."""
    return {0, config.depth} if config.chooses_depth else {config.depth}


class RoundDepth:
    """Mutable: writes the depth of the scheduler's state. is_fixed: the policy is told of the rounds, but not
    asked."""

    def __init__(self, state: SchedulerState, config: EngineConfig) -> None:
        self._state = state
        self._chooses = config.chooses_depth
        self._has_graphs = config.device == "cuda"
        self.is_fixed = False

    def choose(self, num_prompt_tokens: int) -> None:
        """Sets the depth of the next round, if there is one to be chosen. num_prompt_tokens: that may share
        its pass."""
        state = self._state
        if state.depth_policy is None or not self._chooses or self.is_fixed:
            return
        decoding = [request for request in state.running if state.can_decode(request)]
        if not decoding or state.num_audits:
            return
        depths: Sequence[int] = range(state.depth_limit + 1)
        if num_prompt_tokens or (self._has_graphs and not state.is_plain()):
            # Graphs of rare kinds, captured while requests run, are of few depths, too.
            depths = [depth for depth in depths if depth in state.mixed_depths] or depths
        load = RoundLoad(
            len(decoding),
            _num_context_tokens(decoding),
            num_prompt_tokens,
            is_late=is_late(state, decoding, max(depths)),
        )
        state.depth = state.depth_policy.choose(load, depths)

    def begin_round(self, decoding: list[Request], chunks: list[PrefillChunk]) -> RoundLoad | None:
        """Tells the policy of a planned round with these chunks, and returns its load; None where nobody asks
        for it."""
        if self._state.depth_policy is None or not decoding or self._state.num_audits:
            return None
        self._state.depth_policy.begin_round(self._state.depth)
        num_prompt_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        padded = -(-num_prompt_tokens // MIXED_STEP) * MIXED_STEP
        is_usual = self._state.is_plain() and all(request.guide is None for request in decoding)
        return RoundLoad(len(decoding), _num_context_tokens(decoding), padded, is_usual)

    def begin(self, request: Request) -> None:
        """The request takes part in rounds from the next step on."""
        policy = self._state.depth_policy
        if policy is None or request.is_audit:
            return
        if request.draft_record is None:
            temperature, cap = request.sampling.temperature, self._state.own_cap(request)
            request.draft_record = policy.record(temperature, is_masked=request.guide is not None, cap=cap)
        request.draft_record.join()


def _num_context_tokens(decoding: list[Request]) -> int:
    return sum([request.num_computed for request in decoding])
