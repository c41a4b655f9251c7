"""One choice of an answer: token events in, deltas out, and the counts of what was generated.

Every counted token is reported. It comes with the delta in which its text begins; a token without text in the
answer (it ended the text, or a stop string cut it off) comes with the last delta and is placed at the end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import msgspec

from headway.engine import FinishReason, Grammar, SamplingParams, TokenEvent, TokenLogprobs
from headway.server.generation.choice_output import (
    ChoiceOutput,
    NumberedCall,
    OutputOptions,
    Part,
    ReasoningCounter,
    joined,
)
from headway.server.generation.content_stops import StopOptions
from headway.server.generation.prediction import PredictionUse
from headway.server.text.detokenizer import Decoded, Detokenizer, Vocabulary

# The numbers of tokens, of accepted and of rejected drafts (or tokens of the prediction), and of reasoning
# tokens.
Added = tuple[int, int, int, int]
NOTHING: Added = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice: its request to the engine, where its text ends, and what is reported of it.

    stop, stop_token_ids: these end its text; if it has several parts, its content. end_token_ids: those of
    stop_token_ids that are the model's own; no stop_reason names them. min_tokens: a stop string ends the
    text only if it is complete after that many tokens; the engine masks stop tokens. shows_stop: the stop
    string or token that ends the text is part of it. wants_tokens: deltas have their tokens. prompt_index:
    the index of its prompt in the request. shows_output: False for a request that only wants its prompt
    scored; it generates one hidden token. num_candidates: the number of choices of its prompt.
    prediction_token_ids: the predicted output; None without a prediction. grammar: None allows any text.
    output: how the text is split into parts; None for text alone.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_draft_tokens: int | None = None
    prediction_token_ids: list[int] | None = None
    cache_salt: str = ""
    priority: int = 0
    shows_stop: bool = False
    wants_tokens: bool = False
    shows_output: bool = True
    prompt_index: int = 0
    num_candidates: int = 1
    grammar: Grammar | None = None
    output: OutputOptions | None = None

    @property
    def engine_stop_ids(self) -> tuple[int, ...]:
        """Returns the stop tokens that end the output wherever they come."""
        return self.stop_token_ids if self.output is None else self.end_token_ids

    def content_stops(self, vocabulary: Vocabulary) -> StopOptions:
        """Returns the stops of the content of an output with several parts."""
        return StopOptions(
            self.stop,
            frozenset(self.stop_token_ids) - frozenset(self.end_token_ids),
            self.sampling.min_tokens,
            self.shows_stop,
            vocabulary.silent_text,
            [text for text in self.stop if vocabulary.has_silent_text(text)],
        )


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """start: the index of the token's text in the text that it belongs to. logprob: None if not requested.

    top: the most probable tokens at this position with their log-probabilities, best first. draft_position: 1
    for the first accepted draft of a window, 2 for the second, ...; 0 for a token of the target model itself.
    """

    token_id: int
    start: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    draft_position: int = 0


class Delta(msgspec.Struct, frozen=True):
    """A piece of a choice's text. The last one of a choice has its finish_reason.

    stop_reason: the stop string or the id of the stop token that ended the text; None for the model's own
    end. num_tokens, num_accepted, num_rejected, num_reasoning: what it adds to the counts of its choice;
    accepted and rejected are drafts, or tokens of the prediction if there is one. A piece without text yet
    has only its counts. parts: shown instead of the text if it is split into parts; a part may come later
    than its text. end: the length of the text so far. event: its origin, if the stream carries a journal.
    """

    index: int
    text: str
    finish_reason: str | None = None
    tokens: tuple[TokenInfo, ...] = ()
    num_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_reasoning: int = 0
    stop_reason: str | int | None = None
    parts: tuple[Part, ...] | None = None
    end: int = 0
    event: TokenEvent | None = None

    @property
    def is_shown(self) -> bool:
        shown = self.text if self.parts is None else self.parts
        return bool(shown or self.finish_reason or self.tokens)

    def followed_by(self, other: Delta) -> Delta:
        """Returns both deltas of a choice as one."""
        return Delta(
            self.index,
            self.text + other.text,
            other.finish_reason,
            self.tokens + other.tokens,
            self.num_tokens + other.num_tokens,
            self.num_accepted + other.num_accepted,
            self.num_rejected + other.num_rejected,
            self.num_reasoning + other.num_reasoning,
            other.stop_reason,
            None if self.parts is None else joined((*self.parts, *(other.parts or ()))),
            other.end,
        )


@dataclass(frozen=True, slots=True)
class _Ending:
    """The reason why a choice has ended, for its last delta; all None while it runs."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """The text, tokens and counts of one choice. Mutable: owned by its generation."""

    def __init__(self, index: int, request: ChoiceRequest, vocabulary: Vocabulary) -> None:
        self.index = index
        self._request = request
        self._detokenizer = Detokenizer(
            vocabulary,
            request.prompt_token_ids,
            request.stop if request.output is None else (),
            shows_stop=request.shows_stop,
            min_tokens=request.sampling.min_tokens,
        )
        self._output = (
            None
            if request.output is None
            else ChoiceOutput(request.output, request.content_stops(vocabulary))
        )
        self._parts: list[Part] = []
        self._reasoning = ReasoningCounter(None if request.output is None else request.output.thinking)
        self._hidden: list[TokenInfo] = []
        self._num_shown = 0  # the length of the shown text
        self._num_certain = 0  # characters whose part is certain
        self.prompt_logprobs: TokenLogprobs | None = None
        self.is_open = True
        self.finish_reason: str | None = None
        self.num_cached: int | None = None  # cached prompt tokens; None until its first event
        self.prediction = (
            None if request.prediction_token_ids is None else PredictionUse(request.prediction_token_ids)
        )
        self.num_tokens = 0
        self.num_rejected = 0
        self.num_reasoning = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.round_seconds = self.undrafted_seconds = 0.0
        self.first_token_seconds: float | None = None
        self.last_token_seconds = 0.0
        self.queue_seconds = 0.0  # from its arrival at the engine to its first admission

    @property
    def is_waiting(self) -> bool:
        """Returns whether nothing was generated yet."""
        return self.is_open and self.first_token_seconds is None

    def take(self, event: TokenEvent) -> Delta:
        """Returns the tokens of one step as text. A token that ends the output counts; it is shown if
        requested."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.num_cached is not None:
            self.num_cached = event.num_cached
        if not self._request.shows_output:
            return self._delta("", _Ending(_reason_unseen(event)), NOTHING)
        hides_last = event.finish_reason is FinishReason.STOP and not self._request.shows_stop
        decoded = self._push(event.token_ids[:-1] if hides_last else event.token_ids, event)
        if decoded.stop is not None or self._is_complete:
            added = self._count(event, decoded.num_tokens)
            return self._delta(decoded.text, _Ending("stop", self._stop(decoded)), added)
        added = self._count(event, len(event.token_ids))
        if event.finish_reason is None:
            return self._delta(decoded.text, _Ending(), added)
        rest = self._detokenizer.flush()
        self._read(rest.text)
        if self._output is not None:
            self._parts += self._output.finish(is_cut=event.finish_reason is FinishReason.LENGTH)
        if hides_last and self._request.wants_tokens:
            self._hidden.append(
                _token_info(event, len(event.token_ids) - 1, self._detokenizer.num_characters)
            )
        stop = self._stop(rest)
        ending = _Ending("stop", stop) if stop is not None else self._ending(event)
        return self._delta(decoded.text + rest.text, ending, added)

    def _stop(self, decoded: Decoded) -> str | int | None:
        return decoded.stop if self._output is None else self._output.stop

    @property
    def _is_complete(self) -> bool:
        """Returns whether the text has all parts that it may have."""
        return self._output is not None and self._output.is_complete

    def _push(self, token_ids: list[int], event: TokenEvent) -> Decoded:
        """Decodes tokens up to the one that completes a stop string, or the last part of the text."""
        one_by_one = self._request.wants_tokens or (self._output is not None and self._output.may_complete)
        if not one_by_one:
            decoded = self._detokenizer.push(token_ids)
            self._read(decoded.text)
            return decoded
        text: list[str] = []
        for i, token_id in enumerate(token_ids):
            before = self._detokenizer.num_characters
            decoded = self._detokenizer.push([token_id])
            start = self._detokenizer.start_of(token_id, before)
            if self._request.wants_tokens:
                self._hidden.append(_token_info(event, i, start))
            text.append(decoded.text)
            if self._output is not None:
                self._parts += self._output.feed_token(token_id, decoded.text, start)
            if decoded.stop is not None or self._is_complete:
                return Decoded("".join(text), i + 1, decoded.stop)
        return Decoded("".join(text), len(token_ids))

    @property
    def num_calls(self) -> tuple[int, int]:
        """Returns (calls of tools in its text, openers of calls that were malformed)."""
        return (self._output.num_calls, self._output.num_malformed) if self._output is not None else (0, 0)

    def _read(self, text: str) -> None:
        if self._output is not None:
            self._parts += self._output.feed(text)

    def _ending(self, event: TokenEvent) -> _Ending:
        """Returns how the engine ended the output."""
        assert event.finish_reason is not None, event
        is_told = (
            event.finish_reason is FinishReason.STOP
            and event.token_ids[-1] not in self._request.end_token_ids
        )
        return _Ending(event.finish_reason.value, event.token_ids[-1] if is_told else None)

    def _delta(self, text: str, ending: _Ending, added: Added) -> Delta:
        self.is_open = ending.finish_reason is None
        if self.prediction is not None and not self.is_open:
            added = (*added[:2], self.prediction.finish(), added[3])
        parts = None if self._output is None else joined(self._parts)
        self._parts = []
        self.finish_reason = ending.finish_reason
        if self.finish_reason == "stop" and self._output is not None and self._output.num_calls:
            self.finish_reason = "tool_calls"
        self._num_shown += len(text)
        self._num_certain = self._num_shown if parts is None else self._end_of(parts)
        tokens = self._release() if self._hidden else ()
        return Delta(
            self.index,
            text,
            self.finish_reason,
            tokens,
            *added,
            stop_reason=ending.stop_reason,
            parts=parts,
            end=self._num_shown,
        )

    def _end_of(self, parts: tuple[Part, ...]) -> int:
        """Returns the end of the last part, after which text is held back. A call ends with everything
        that has arrived."""
        if not parts:
            return self._num_certain
        last = parts[-1]
        return self._num_shown if isinstance(last, NumberedCall) else last.start + len(last.text)

    def _release(self) -> tuple[TokenInfo, ...]:
        """Returns and removes the tokens whose text begins before the end of what is certain to be shown;
        at the end all of them."""
        end = self._num_shown
        num_ready = len(self._hidden)
        if self.is_open:
            num_ready = sum(token.start < self._num_certain for token in self._hidden)
        released, self._hidden = self._hidden[:num_ready], self._hidden[num_ready:]
        return tuple(token if token.start <= end else replace(token, start=end) for token in released)

    def _count(self, event: TokenEvent, num_tokens: int) -> Added:
        num_accepted = max(0, min(event.num_accepted, num_tokens - event.draft_start))
        num_rejected = event.num_drafted - event.num_accepted
        num_reasoning = self._reasoning.count(event.token_ids[:num_tokens])
        self.num_tokens += num_tokens
        self.num_rejected += num_rejected
        self.round_seconds += event.round_seconds
        self.undrafted_seconds += event.undrafted_seconds
        self.num_reasoning += num_reasoning
        _count_up(self.drafted_per_position, event.num_drafted)
        _count_up(self.accepted_per_position, num_accepted)
        self.last_token_seconds = time.monotonic()
        if self.first_token_seconds is None and num_tokens:
            self.first_token_seconds = self.last_token_seconds
        if self.prediction is not None:
            # Rejected tokens of the prediction are known at the end.
            num_accepted, num_rejected = self.prediction.take(event.token_ids[:num_tokens]), 0
        return num_tokens, num_accepted, num_rejected, num_reasoning


def _reason_unseen(event: TokenEvent) -> str | None:
    """Returns the finish reason of a hidden output: if no token is part of the answer, no token can stop
    it."""
    reason = FinishReason.LENGTH if event.finish_reason is FinishReason.STOP else event.finish_reason
    return reason.value if reason else None


def _count_up(per_position: list[int], number: int) -> None:
    """Adds one at each of the first `number` positions."""
    per_position += [0] * (number - len(per_position))
    for i in range(number):
        per_position[i] += 1


def _token_info(event: TokenEvent, i: int, start: int) -> TokenInfo:
    token_id, logprobs, position = event.token_ids[i], event.logprobs, _draft_position(event, i)
    if logprobs is None:
        return TokenInfo(token_id, start, draft_position=position)
    top = slice(i * logprobs.num_top, (i + 1) * logprobs.num_top)
    pairs = zip(logprobs.top_ids[top], logprobs.top_logprobs[top], strict=True)
    return TokenInfo(token_id, start, logprobs.logprobs[i], tuple(pairs), position)


def _draft_position(event: TokenEvent, i: int) -> int:
    """Returns the token's place among the drafts: [prefill's token, draft 1, draft 2, bonus] with
    draft_start 1 and num_accepted 2 -> 0, 1, 2, 0."""
    place = i - event.draft_start
    return place + 1 if 0 <= place < event.num_accepted else 0
