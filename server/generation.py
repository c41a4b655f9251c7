"""Prompts to text: one group of requests from submission to the last delta, and what was observed on the way.

Knows no HTTP: `cli complete` uses it as the API does. Leaving the loop over the deltas, in whatever way,
aborts what still runs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from headway.engine import (
    EngineDeadError,
    FinishReason,
    HeadwayError,
    QueueFullError,
    RequestError,
    SamplingParams,
    Submit,
    TokenEvent,
)
from headway.server.detokenizer import Detokenizer, Vocabulary
from headway.server.engine_client import EngineClient
from headway.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice: what goes to the engine and where its text ends."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a choice's text. The last one of a choice carries its finish_reason."""

    index: int
    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    num_completion_tokens: int
    num_accepted: int
    num_rejected: int


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice j of a prompt: 64 bits of sha256, so that neighbours have nothing in common."""
    text = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Choice:
    """Text and counts of one choice. Mutable: owned by its generation."""

    def __init__(self, index: int, request: ChoiceRequest, vocabulary: Vocabulary) -> None:
        self._index = index
        self._detokenizer = Detokenizer(vocabulary, request.prompt_token_ids, request.stop)
        self.is_open = True
        self.num_tokens = 0
        self.num_accepted = 0
        self.num_rejected = 0
        self.first_token_seconds: float | None = None
        self.last_token_seconds = 0.0

    def take(self, event: TokenEvent) -> Delta:
        """The tokens of one round as text. The token that ended the output counts but is not shown."""
        ends_by_token = event.finish_reason is FinishReason.STOP
        shown = event.token_ids[:-1] if ends_by_token else event.token_ids
        decoded = self._detokenizer.push(shown)
        num_tokens = decoded.num_tokens if decoded.is_stopped else len(event.token_ids)
        self._count(event, num_tokens)
        if decoded.is_stopped or event.finish_reason is None:
            return self._delta(decoded.text, "stop" if decoded.is_stopped else None)
        rest = self._detokenizer.flush()
        reason = "stop" if rest.is_stopped else event.finish_reason.value
        return self._delta(decoded.text + rest.text, reason)

    def _delta(self, text: str, finish_reason: str | None) -> Delta:
        self.is_open = finish_reason is None
        return Delta(self._index, text, finish_reason)

    def _count(self, event: TokenEvent, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_accepted += min(event.num_accepted, num_tokens)
        self.num_rejected += event.num_drafted - event.num_accepted
        self.last_token_seconds = time.monotonic()
        if self.first_token_seconds is None and num_tokens:
            self.first_token_seconds = self.last_token_seconds


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
        self._arrival_seconds = time.monotonic()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Close it (contextlib.aclosing) when leaving early: that aborts the requests."""
        submits = [_submit(self._engine.new_request_id(), request) for request in self._requests]
        choices = {s.request_id: choice for s, choice in zip(submits, self._choices, strict=True)}
        stream = self._engine.submit(submits)
        try:
            while any(choice.is_open for choice in self._choices):
                for event in await stream.take():
                    choice = choices[event.request_id]
                    if not choice.is_open:
                        continue  # it was in flight when a stop string ended the choice
                    delta = choice.take(_checked(event))
                    if not choice.is_open:
                        self._finish(choice)
                        self._engine.abort([event.request_id])
                    if delta.text or delta.finish_reason:
                        yield delta
        finally:
            self._engine.abort(choices)

    def counts(self) -> Counts:
        """So far; of all choices."""
        return Counts(
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
            num_accepted=sum(choice.num_accepted for choice in self._choices),
            num_rejected=sum(choice.num_rejected for choice in self._choices),
        )

    def _finish(self, choice: Choice) -> None:
        if self._metrics is None or choice.first_token_seconds is None:
            return
        self._metrics.time_to_first_token.observe(choice.first_token_seconds - self._arrival_seconds)
        self._metrics.end_to_end.observe(choice.last_token_seconds - self._arrival_seconds)
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
    )


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
    return RequestError(message, code=event.error_code)
