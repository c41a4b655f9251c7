"""Prompts to text: one group of requests from submission to the last delta, and what was observed on the way.

Knows no HTTP: `cli complete` uses it as the API does. Leaving the loop over the deltas, in whatever way,
aborts what still runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from headway.engine import (
    EngineDeadError,
    FinishReason,
    HeadwayError,
    QueueFullError,
    RequestError,
    Submit,
    TokenEvent,
    TokenLogprobs,
)
from headway.server.choice import Choice, ChoiceRequest, Delta
from headway.server.detokenizer import Vocabulary
from headway.server.engine_client import EngineClient, EventStream
from headway.server.errors import ApiError
from headway.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Counts:
    """Of all choices. The lists are by position in the window."""

    num_completion_tokens: int
    num_accepted: int
    num_rejected: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice j of a prompt: 64 bits of sha256, so that neighbours have nothing in common."""
    text = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Generation:
    """All choices of one API request. Mutable; `deltas` is run through once."""

    def __init__(
        self,
        engine: EngineClient,
        vocabulary: Vocabulary,
        requests: Sequence[ChoiceRequest],
        *,
        metrics: Metrics | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._requests = requests
        self._choices = [Choice(i, request, vocabulary) for i, request in enumerate(requests)]
        self.arrival_seconds = time.monotonic()
        self._stream: EventStream | None = None
        self._request_ids: list[int] = []
        self.error: HeadwayError | None = None  # what ended it before its time
        self.queue_seconds: float | None = None  # of the choice that was admitted last

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Close it (contextlib.aclosing) when leaving early: that aborts the requests."""
        submits = [_submit(self._engine.new_request_id(), request) for request in self._requests]
        choices = {s.request_id: choice for s, choice in zip(submits, self._choices, strict=True)}
        self._request_ids = list(choices)
        self._stream = stream = self._engine.submit(submits)
        try:
            while any(choice.is_open for choice in self._choices):
                for event in await stream.take():
                    choice = choices[event.request_id]
                    if not choice.is_open:
                        continue  # it was in flight when a stop string ended the choice
                    previous_seconds = choice.last_token_seconds
                    delta = choice.take(_checked(event))
                    self._observe(event, choice, previous_seconds)
                    if not choice.is_open:
                        self._finish(choice)
                        self._engine.abort([event.request_id], FinishReason.STOP)
                    if delta.text or delta.finish_reason or delta.tokens:
                        yield delta
        except HeadwayError as error:
            self.error = error
            raise
        finally:
            self._engine.abort(choices)

    def fail(self, error: HeadwayError) -> None:
        """Ends what still runs; the reader of the deltas gets the error."""
        self._engine.abort(self._request_ids)
        if self._stream is not None:
            self._stream.fail(error)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of the choices that have no token yet."""
        pairs = zip(self._requests, self._choices, strict=True)
        return sum(len(request.prompt_token_ids) for request, choice in pairs if choice.is_waiting)

    def prompt_logprobs(self, index: int) -> TokenLogprobs | None:
        """Of the prompt of that choice, once its first delta has come; None if not asked for."""
        return self._choices[index].prompt_logprobs

    def counts(self) -> Counts:
        """So far."""
        return Counts(
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
            num_accepted=sum(sum(choice.accepted_per_position) for choice in self._choices),
            num_rejected=sum(choice.num_rejected for choice in self._choices),
            drafted_per_position=_sums(choice.drafted_per_position for choice in self._choices),
            accepted_per_position=_sums(choice.accepted_per_position for choice in self._choices),
        )

    @property
    def outcomes(self) -> list[str]:
        """Of each choice: its finish_reason, or what ended it instead: error, or abort by client or operator."""
        unfinished = FinishReason.ABORT if self.error is None else FinishReason.ERROR
        return [choice.finish_reason or unfinished.value for choice in self._choices]

    @property
    def first_token_seconds(self) -> float | None:
        """From the arrival to the first token of any choice."""
        times = [c.first_token_seconds for c in self._choices if c.first_token_seconds is not None]
        return min(times) - self.arrival_seconds if times else None

    @property
    def last_token_seconds(self) -> float | None:
        """From the arrival to the last token so far of any choice."""
        times = [c.last_token_seconds for c in self._choices if c.first_token_seconds is not None]
        return max(times) - self.arrival_seconds if times else None

    def _observe(self, event: TokenEvent, choice: Choice, previous_seconds: float) -> None:
        """previous_seconds: of the choice's tokens before this event; 0 if there were none."""
        if event.queue_seconds is not None:
            self.queue_seconds = event.queue_seconds
        if self._metrics is None:
            return
        if event.queue_seconds is not None:
            self._metrics.queue_time.observe(event.queue_seconds)
        if previous_seconds:
            self._metrics.chunk_gap.observe(choice.last_token_seconds - previous_seconds)

    def _finish(self, choice: Choice) -> None:
        if self._metrics is None or choice.first_token_seconds is None:
            return
        self._metrics.time_to_first_token.observe(choice.first_token_seconds - self.arrival_seconds)
        self._metrics.end_to_end.observe(choice.last_token_seconds - self.arrival_seconds)
        if choice.num_tokens > 1:
            decode_seconds = choice.last_token_seconds - choice.first_token_seconds
            self._metrics.time_per_output_token.observe(decode_seconds / (choice.num_tokens - 1))


def _submit(request_id: int, request: ChoiceRequest) -> Submit:
    return Submit(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.stop_token_ids),
        max_draft_tokens=request.max_draft_tokens,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def _sums(lists: Iterable[list[int]]) -> list[int]:
    return [sum(entries) for entries in zip_longest(*lists, fillvalue=0)]


def _checked(event: TokenEvent) -> TokenEvent:
    """Raises what the engine refused the request with."""
    if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
        raise _refusal(event)
    return event


def _refusal(event: TokenEvent) -> HeadwayError:
    message = event.error or "the engine ended this request"
    if event.error_code == "queue_full":
        return QueueFullError(message, code=event.error_code)
    if event.error_code is None:
        return EngineDeadError(message)
    if event.error_code == "internal_error":  # a fault of the engine's own, which ended this request alone
        return ApiError(message, status=500, code=event.error_code)
    return RequestError(message, code=event.error_code)
