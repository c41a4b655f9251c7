"""Decides which rows of a step are masked, and fills their masks between the halves of the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from headway.engine.grammar.guide import Guide
from headway.engine.grammar.masks import GuidedWindow, MaskBuffer, MaskFiller
from headway.engine.protocol.errors import RequestError
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Request
from headway.engine.scheduling.scheduler_state import SchedulerState


class Masking:
    """Mutable: ends requests that are at a dead end, and counts masked rows."""

    def __init__(self, state: SchedulerState, filler: MaskFiller, *, vocab_size: int) -> None:
        self._state = state
        self._filler = filler
        self._vocab_size = vocab_size

    def fill(self, plan: Plan, drafts: Sequence[Sequence[int]], buffer: MaskBuffer) -> dict[int, int]:
        """Fills the buffer for the step, of which the host has read all steps before. Returns the entry of
        each row that is masked; rows whose requests have ended meanwhile are not.

        drafts: by row of the round, of any value where a row may not have as many.
        """
        windows: list[GuidedWindow] = []
        entries: dict[int, int] = {}
        owners: dict[Guide, Request] = {}
        for row, request_id in guided_rows(plan):
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


def guided_rows(plan: Plan) -> list[tuple[int, int]]:
    """Returns (row, request id) of each row of the plan whose next tokens a grammar restricts."""
    by_row = {row: i for row, i in enumerate(plan.decode_request_ids) if i is not None}
    by_row |= {chunk.row: chunk.request_id for chunk in plan.prefill if chunk.is_last}
    return [(row, by_row[row]) for row in plan.guided_rows]


def _raise(request: Request, error: RequestError) -> None:
    raise error
