"""Prompts to text: one group of requests from submission to the last delta, with its observations.

It knows no HTTP: `cli complete` uses it as the API does. Events become deltas as they arrive, whether or not
anybody reads them: a slow reader changes neither when a stop string ends a choice nor what is observed.
Leaving the loop over the deltas, in whatever way, aborts what still runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

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
from headway.server.base.continuation import Continuation, Journal
from headway.server.base.errors import ApiError
from headway.server.engine.client import EngineClient
from headway.server.generation.choice import Choice, ChoiceRequest, Delta
from headway.server.telemetry.metrics import Metrics
from headway.server.telemetry.request_metrics import FinishedChoice
from headway.server.text.detokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts over all choices. The lists are by position in the window.

    estimated_speedup: estimated time of the rounds without drafts over their time; None if nothing is known
    of it. prediction: the predicted tokens that were accepted and rejected so far; None without a prediction.
    """

    num_completion_tokens: int
    num_accepted: int
    num_rejected: int
    num_reasoning: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    estimated_speedup: float | None
    prediction: tuple[int, int] | None = None


MAX_JOINED_CHARACTERS = 4096


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of choice j of a prompt: 64 bits of sha256, so that neighbours have nothing in
    common."""
    text = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class DeltaQueue:
    """Deltas that wait for their reader, in order. Mutable: filled by a generation, read by one task.

    For a slow reader, pieces of one choice are joined, so that it catches up with few writes.
    """

    def __init__(self, *, joins: bool = True) -> None:
        """joins: False if the stream carries a journal."""
        self._joins = joins
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._has_news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        deltas = self._deltas
        last = deltas[-1] if deltas and self._joins else None
        if last is not None and last.index == delta.index and len(last.text) < MAX_JOINED_CHARACTERS:
            deltas[-1] = last.followed_by(delta)
        else:
            deltas.append(delta)
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._has_news.set()

    async def take(self) -> Delta:
        """Returns the next delta. Raises the group's error once all deltas before it are read."""
        if not self._deltas:
            if self._error is None:
                self._has_news.clear()
                await self._has_news.wait()
            if not self._deltas and self._error is not None:
                raise self._error
        return self._deltas.popleft()


class Generation:
    """All choices of one API request, and the receiver of their events. Mutable; `deltas` is iterated
    once."""

    def __init__(
        self,
        engine: EngineClient,
        vocabulary: Vocabulary,
        requests: Sequence[ChoiceRequest],
        *,
        metrics: Metrics | None = None,
        label: str = "",
        continuation: Continuation | None = None,
    ) -> None:
        """label: the name of the API request in the engine's logs; empty if it has none. continuation: its
        beginning, and whether it keeps a journal; None for a new answer."""
        self._label = label
        self._told = () if continuation is None else continuation.told
        is_told = continuation is not None and continuation.keeps_journal
        self.journal = Journal(continuation.num_sent) if continuation is not None and is_told else None
        self._engine = engine
        self._metrics = metrics
        self._requests = requests
        self._choices = [Choice(i, request, vocabulary) for i, request in enumerate(requests)]
        self.arrival_seconds = time.monotonic()
        self._queue = DeltaQueue(joins=self.journal is None)
        self._choices_by_id: dict[int, Choice] = {}
        self.error: HeadwayError | None = None  # the error that ended it early
        self.queue_seconds: float | None = None  # the waiting time of the choice that was admitted last

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields the deltas. Close it (contextlib.aclosing) when leaving early: that aborts the requests."""
        ids = [self._engine.new_request_id() for _ in self._requests]
        self._choices_by_id = dict(zip(ids, self._choices, strict=True))
        outputs = self._retell()
        submits = [
            _submit(request_id, self._requests[choice.index], outputs.get(choice.index), ids[0], self._label)
            for request_id, choice in self._choices_by_id.items()
            if choice.is_open
        ]
        if submits:
            self._engine.submit(submits, self)
        try:
            num_open = len(ids)
            while num_open:
                delta = await self._queue.take()
                num_open -= delta.finish_reason is not None
                if delta.event is not None and self.journal is not None:
                    self.journal.add(delta.event)
                yield delta
        except HeadwayError as error:
            self.error = error
            raise
        finally:
            self._engine.abort(self._choices_by_id)

    def _retell(self) -> dict[int, list[int]]:
        """Brings the choices to the state in which another server left them. Returns the tokens of each
        choice that has any."""
        outputs: dict[int, list[int]] = {}
        for event in self._told:
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
            self._queue.put(self._choices[event.request_id].take(event))
        return outputs

    def put(self, event: TokenEvent) -> None:
        """Takes an event of one of the choices; an error in it fails this generation alone."""
        choice = self._choices_by_id[event.request_id]
        if not choice.is_open:
            return  # the event was in flight when a stop string ended the choice
        try:
            self._take(event, choice)
        except Exception as error:  # noqa: BLE001  # raised again where the deltas are read
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends what still runs; the reader of the deltas gets the error."""
        self._engine.abort(self._choices_by_id)
        self._queue.fail(error)

    def _take(self, event: TokenEvent, choice: Choice) -> None:
        previous_seconds = choice.last_token_seconds
        _check(event)
        delta = choice.take(event)
        self._observe(event, choice, previous_seconds)
        if not choice.is_open:
            self._finish(choice)
            self._engine.abort([event.request_id], FinishReason.STOP)
        if self.journal is not None:
            own = msgspec.structs.replace(event, request_id=choice.index)
            delta = msgspec.structs.replace(delta, event=own)
        self._queue.put(delta)

    @property
    def num_waiting_tokens(self) -> int:
        """Returns the prompt tokens of the choices that have no token yet."""
        pairs = zip(self._requests, self._choices, strict=True)
        return sum(len(request.prompt_token_ids) for request, choice in pairs if choice.is_waiting)

    def prompt_logprobs(self, index: int) -> TokenLogprobs | None:
        """Returns the prompt's log-probabilities, available from the choice's first delta on; None if not
        requested."""
        return self._choices[index].prompt_logprobs

    def counts(self) -> Counts:
        """Returns the counts over all received events, some of which the reader of the deltas may not have
        reached yet."""
        return Counts(
            num_completion_tokens=sum(choice.num_tokens for choice in self._choices),
            num_accepted=sum(sum(choice.accepted_per_position) for choice in self._choices),
            num_rejected=sum(choice.num_rejected for choice in self._choices),
            num_reasoning=sum(choice.num_reasoning for choice in self._choices),
            drafted_per_position=_sums(choice.drafted_per_position for choice in self._choices),
            accepted_per_position=_sums(choice.accepted_per_position for choice in self._choices),
            estimated_speedup=self._estimated_speedup(),
            prediction=self._prediction(),
        )

    def _prediction(self) -> tuple[int, int] | None:
        uses = [choice.prediction for choice in self._choices if choice.prediction is not None]
        return (
            (sum(use.num_accepted for use in uses), sum(use.num_rejected for use in uses)) if uses else None
        )

    def _estimated_speedup(self) -> float | None:
        seconds = sum(choice.round_seconds for choice in self._choices)
        return sum(choice.undrafted_seconds for choice in self._choices) / seconds if seconds > 0 else None

    @property
    def num_cached_tokens(self) -> int:
        """Returns the prompt tokens that came from the prefix cache, each prompt counted once. Later
        choices of a prompt may find what the first one computed, so that the smallest number of its
        choices counts."""
        fewest: dict[int, int] = {}
        for request, choice in zip(self._requests, self._choices, strict=True):
            if choice.num_cached is not None:
                index = request.prompt_index
                fewest[index] = min(choice.num_cached, fewest.get(index, choice.num_cached))
        return sum(fewest.values())

    @property
    def outcomes(self) -> list[str]:
        """Returns the finish_reason of each choice, or what ended it instead: error, or abort by client or
        operator."""
        unfinished = FinishReason.ABORT if self.error is None else FinishReason.ERROR
        return [choice.finish_reason or unfinished.value for choice in self._choices]

    @property
    def first_token_seconds(self) -> float | None:
        """Returns the time from the arrival to the first token of any choice."""
        times = [c.first_token_seconds for c in self._choices if c.first_token_seconds is not None]
        return min(times) - self.arrival_seconds if times else None

    @property
    def last_token_seconds(self) -> float | None:
        """Returns the time from the arrival to the last token so far of any choice."""
        times = [c.last_token_seconds for c in self._choices if c.first_token_seconds is not None]
        return max(times) - self.arrival_seconds if times else None

    def _observe(self, event: TokenEvent, choice: Choice, previous_seconds: float) -> None:
        """previous_seconds: the time of the choice's tokens before this event; 0 if there were none."""
        if event.queue_seconds is not None:
            self.queue_seconds = choice.queue_seconds = event.queue_seconds
        if self._metrics is None:
            return
        if event.queue_seconds is not None:
            self._metrics.requests.queue_time.observe(event.queue_seconds)
        if previous_seconds:
            self._metrics.requests.chunk_gap.observe(choice.last_token_seconds - previous_seconds)

    def _finish(self, choice: Choice) -> None:
        if self._metrics is None or choice.first_token_seconds is None:
            return
        self._metrics.requests.count_tool_calls(*choice.num_calls)
        request = self._requests[choice.index]
        self._metrics.requests.observe_choice(
            FinishedChoice(
                num_prompt_tokens=len(request.prompt_token_ids),
                num_tokens=choice.num_tokens,
                max_tokens=request.max_tokens,
                queue_seconds=choice.queue_seconds,
                first_token_seconds=choice.first_token_seconds - self.arrival_seconds,
                last_token_seconds=choice.last_token_seconds - self.arrival_seconds,
            )
        )
        start = choice.index - choice.index % request.num_candidates
        candidates = self._choices[start : start + request.num_candidates]
        if not any(candidate.is_open for candidate in candidates):
            longest = max(candidate.num_tokens for candidate in candidates)
            self._metrics.requests.observe_prompt(request.num_candidates, longest)


def _submit(
    request_id: int, request: ChoiceRequest, output: list[int] | None, group_id: int, label: str
) -> Submit:
    return Submit(
        request_id=request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop_token_ids=list(request.engine_stop_ids),
        max_draft_tokens=request.max_draft_tokens,
        prediction_token_ids=request.prediction_token_ids or [],
        cache_salt=request.cache_salt,
        priority=request.priority,
        group_id=group_id,
        grammar=request.grammar,
        label=label,
        output_token_ids=output,
    )


def _sums(lists: Iterable[list[int]]) -> list[int]:
    return [sum(entries) for entries in zip_longest(*lists, fillvalue=0)]


def _check(event: TokenEvent) -> None:
    """Raises the error with which the engine refused or ended the request."""
    if event.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
        return
    message = event.error or "the engine ended this request"
    if event.error_code == "queue_full":
        raise QueueFullError(message, code=event.error_code)
    if event.error_code is None:
        raise EngineDeadError(message)
    if event.error_code == "internal_error":  # a fault of the engine's own, which ended this request alone
        raise ApiError(message, status=500, code=event.error_code)
    raise RequestError(message, code=event.error_code, param=event.error_param)
