"""Collects the tokens that one step added to one request, and turns them into an event."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.engine.protocol.errors import INTERNAL_ERROR, RequestError
from headway.engine.protocol.logprobs import TokenLogprobs, join
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan, StepResult
from headway.engine.scheduling.request import Request


class SampledTokens(NamedTuple):
    """Tokens that the device sampled for a request in one step."""

    token_ids: tuple[int, ...]
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class RequestUpdate:
    """Mutable: the prefill and the round of a step both add to it. num_of_round: the number of tokens of the
    round."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_of_round: int = 0
    round_seconds: float = 0.0
    undrafted_seconds: float = 0.0
    draft_start: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    queue_seconds: float | None = None
    num_cached: int | None = None

    def add(self, request: Request, sampled: SampledTokens) -> tuple[int, ...]:
        """Adds tokens up to the first one that ends the request, and returns these."""
        kept, self.finish_reason = _until_end(request, sampled.token_ids)
        if not request.output_token_ids:
            self.queue_seconds = request.queue_seconds
            self.num_cached = request.num_prompt_cached
        self.token_ids += kept
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs.cut(len(kept)))
        if request.scores_prompt:
            self.prompt_logprobs = join(request.prompt_logprobs)
        return kept

    def event(self, request_id: int) -> TokenEvent:
        return TokenEvent(
            request_id,
            self.token_ids,
            self.finish_reason,
            self.num_drafted,
            self.num_accepted,
            logprobs=join(self.logprobs) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
            queue_seconds=self.queue_seconds,
            draft_start=self.draft_start,
            num_cached=self.num_cached,
            round_seconds=self.round_seconds,
            undrafted_seconds=self.undrafted_seconds,
        )


def first_tokens(plan: Plan, result: StepResult) -> dict[int, SampledTokens]:
    """Returns the first token of each prefill that ended, by request id."""
    request_ids = [chunk.request_id for chunk in plan.prefill if chunk.is_last]
    logprobs = result.first_logprobs or [None] * len(request_ids)
    columns = zip(request_ids, result.first_token_ids, logprobs, strict=True)
    return {request_id: SampledTokens((token_id,), scores) for request_id, token_id, scores in columns}


def round_tokens(plan: Plan, result: StepResult) -> Iterator[tuple[int, SampledTokens]]:
    """Returns (request id, tokens) of each row of the round that was not padding when it was planned."""
    logprobs = result.emitted_logprobs or [None] * len(result.emitted)
    columns = zip(plan.decode_request_ids, result.emitted, logprobs, strict=True)
    return ((i, SampledTokens(tokens, scores)) for i, tokens, scores in columns if i is not None)


def fault_event(request_id: int, what: str) -> TokenEvent:
    """Returns the event that ends a request because of an internal error."""
    return TokenEvent(request_id, [], FinishReason.ERROR, error=what, error_code=INTERNAL_ERROR)


def refusal_event(request_id: int, error: RequestError) -> TokenEvent:
    """Returns the event that ends a request which cannot be served, or not any longer."""
    return TokenEvent(
        request_id, [], FinishReason.ERROR, error=str(error), error_code=error.code, error_param=error.param
    )


def _until_end(request: Request, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """Returns the tokens that stay, and the reason why the request ends with them, if it does. A stop token
    at the end of max_tokens counts as a stop."""
    room = request.max_tokens - len(request.output_token_ids)
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in request.stop_token_ids:
            return token_ids[:count], FinishReason.STOP
        if count == room:
            return token_ids[:count], FinishReason.LENGTH
    return token_ids, None
