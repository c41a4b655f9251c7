"""Turns the result of a step into events: tokens, log-probabilities and acceptance of each request."""

from __future__ import annotations

import math

from headway.engine.protocol.errors import LogitsError
from headway.engine.protocol.logprobs import TokenLogprobs
from headway.engine.protocol.messages import TokenEvent
from headway.engine.scheduling.plan import Plan, PrefillChunk, StepResult
from headway.engine.scheduling.request import Request, Status
from headway.engine.scheduling.scheduler_state import SchedulerState
from headway.engine.scheduling.updates import RequestUpdate, SampledTokens, first_tokens, round_tokens

_BROKEN_LOGITS = (
    "the model produced NaN or infinite logits for this request, at {}; other requests are not affected. A weight that "
    "these tokens need is broken, or a value exceeds what --dtype can hold"
)

Updates = dict[int, RequestUpdate]


class ResultReader:
    """Mutable: writes requests and counters of the scheduler's state."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def read(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        """Returns one event for each request that got tokens, in the plan's order: prefills, then rows.

        Output ends with the first stop token; tokens after it, and tokens of a request that has ended, are
        dropped.
        """
        state = self._state
        state.stats.count_work(result.seconds, result.num_graph_replays)
        num_generated_before = state.num_generated
        for request_id, what in result.faults:
            if (request := state.requests.get(request_id)) is not None:
                state.end_by_fault(request, what)
        updates: Updates = {}
        self._read_prefill(plan, result, updates)
        self._read_round(plan, result, updates)
        self._read_time(plan, result, updates)
        num_generated = state.num_generated - num_generated_before
        state.stats.count_step(sum(len(chunk.token_ids) for chunk in plan.prefill) + num_generated)
        events: list[TokenEvent] = []
        for request_id, update in updates.items():
            if (request := state.requests.get(request_id)) is not None:
                state.contain(self._report, request, update, events)
        return events

    def _read_prefill(self, plan: Plan, result: StepResult, updates: Updates) -> None:
        state = self._state
        first = first_tokens(plan, result)
        scores = result.prompt_logprobs or [None] * len(plan.prefill)
        for chunk, chunk_scores in zip(plan.prefill, scores, strict=True):
            request = state.requests.get(chunk.request_id)
            if request is not None:
                state.contain(self._read_chunk, request, chunk, chunk_scores)
                if chunk.is_last and request.status is not Status.FINISHED:
                    state.contain(self._append, request, first[request.request_id], updates)

    def _read_chunk(self, request: Request, chunk: PrefillChunk, scores: TokenLogprobs | None) -> None:
        request.num_chunks_in_flight -= 1
        if scores is not None:
            if any(map(math.isnan, scores.logprobs)):
                raise LogitsError(_BROKEN_LOGITS.format("its prompt"))
            earlier = request.prompt_logprobs if chunk.start > 0 else []
            request.prompt_logprobs = [*earlier, scores]
        request.num_draft_filled = chunk.start + len(chunk.token_ids)
        if request.block_ids:
            self._state.prefixes.publish(request, request.num_draft_filled)

    def _read_round(self, plan: Plan, result: StepResult, updates: Updates) -> None:
        requests, contain, read_row = self._state.requests, self._state.contain, self._read_row
        for request_id, sampled in round_tokens(plan, result):
            request = requests.get(request_id)
            if request is not None:
                contain(read_row, request, plan, sampled, updates)

    def _read_time(self, plan: Plan, result: StepResult, updates: Updates) -> None:
        """Reports the round to the depth policy, and counts the time that its tokens would have taken without
        drafts."""
        policy, load, seconds = self._state.depth_policy, plan.load, result.seconds.round
        if policy is None or load is None:
            return
        undrafted_seconds, num_tokens = policy.undrafted_seconds(load, plan.depth, seconds), 0
        whole_seconds = seconds + (policy.catch_up_seconds(load) if plan.catches_up else 0.0)
        for request_id in plan.decode_request_ids:
            if request_id is not None and (update := updates.get(request_id)) is not None:
                update.round_seconds = whole_seconds
                update.undrafted_seconds = update.num_of_round * undrafted_seconds
                num_tokens += update.num_of_round
        self._state.stats.round_seconds += whole_seconds
        self._state.stats.undrafted_seconds += num_tokens * undrafted_seconds / load.num_rows
        policy.end_round(load, plan.depth, seconds)

    def _read_row(self, request: Request, plan: Plan, sampled: SampledTokens, updates: Updates) -> None:
        """Adds the tokens of a round to its request. num_accepted counts drafts that stay in the output: a
        stop token cuts off the drafts after it."""
        state = self._state
        length = request.num_tokens - 1
        num_drafted = min(plan.depth, state.own_cap(request), request.limit - length - 1)
        num_emitted = len(sampled.token_ids)
        assert 1 <= num_emitted <= num_drafted + 1, (
            f"request {request.request_id} at length {length} with {num_drafted} drafts emitted {sampled.token_ids}"
        )
        num_kept = self._append(request, sampled, updates)
        num_accepted = min(num_emitted - 1, num_kept)
        update = updates[request.request_id]
        update.num_of_round = num_kept
        update.num_drafted += num_drafted
        update.num_accepted += num_accepted
        update.draft_start = len(update.token_ids) - num_kept
        if request.draft_record is not None:
            request.draft_record.note(num_drafted, num_emitted - 1)
        state.stats_of(request).count_row_round(
            num_drafted=num_drafted, num_accepted=num_accepted, num_emitted=num_kept
        )
        request.num_rounds_in_flight -= 1
        request.num_tokens_in_flight -= plan.depth + 1
        if request.status is Status.RUNNING:
            request.num_computed = request.num_tokens - 1
            self._note_slots(request, plan, length)
            state.prefixes.publish(request, min(request.num_computed, request.num_draft_filled))

    def _note_slots(self, request: Request, plan: Plan, start: int) -> None:
        """Updates the number of tokens whose drafter state is final, after a round from length start on.

        With late slots a round with drafts computes true pairs up to slot start. The later slots come from
        drafts and are rewritten by the next such round. Slots 0 .. start are start + 1 tokens. Catching up
        leaves out the newest pair.
        """
        if not self._state.has_late_slots:
            request.num_draft_filled = request.num_computed
        elif plan.depth > 0:
            request.num_draft_filled = start + 1
        elif plan.catches_up:
            request.num_draft_filled = start

    def _append(self, request: Request, sampled: SampledTokens, updates: Updates) -> int:
        """Adds tokens up to the first that ends the request; returns how many were kept."""
        kept = updates.setdefault(request.request_id, RequestUpdate()).add(request, sampled)
        if any(token_id < 0 for token_id in kept):
            raise LogitsError(_BROKEN_LOGITS.format(f"token {request.num_tokens + 1:,} of its context"))
        request.output_token_ids += kept
        self._state.stats_of(request).num_generation_tokens += len(kept)
        if request.guide is not None:
            request.guide.advance(kept)
        return len(kept)

    def _report(self, request: Request, update: RequestUpdate, events: list[TokenEvent]) -> None:
        event = update.event(request.request_id)
        if update.finish_reason is not None:
            self._state.finish(request, update.finish_reason)
        events.append(event)
