"""One choice of an answer: token events in, deltas out, and the counts of what was generated.

What a delta tells of tokens is about its text: a token comes with the delta in which its text begins, and
tokens that a stop string cut away never come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from headway.engine import FinishReason, SamplingParams, TokenEvent, TokenLogprobs
from headway.server.detokenizer import Decoded, Detokenizer, Vocabulary

Added = tuple[int, int, int]  # tokens, accepted drafts, rejected drafts
NOTHING: Added = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One choice: what goes to the engine, where its text ends and what is told of it.

    shows_stop: the stop string or token that ends the text is part of it.
    wants_tokens: deltas tell their tokens.
    prompt_index: which of the request's prompts it is of.
    shows_output: False for a request that only wants its prompt scored; it generates one token unseen.
    num_candidates: how many choices its prompt gets.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    max_draft_tokens: int | None = None
    cache_salt: str = ""
    priority: int = 0
    shows_stop: bool = False
    wants_tokens: bool = False
    shows_output: bool = True
    prompt_index: int = 0
    num_candidates: int = 1


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """start: where the token's text begins in the text it is part of. logprob: None if not asked for.

    top: the most probable tokens of the place with their log-probabilities, best first.
    draft_position: 1 for the first draft of a window that was accepted, 2 for the second, ...; 0 for a token
    that the target model gave itself.
    """

    token_id: int
    start: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    draft_position: int = 0


class Delta(msgspec.Struct, frozen=True):
    """A piece of a choice's text. The last one of a choice carries its finish_reason.

    num_tokens, num_accepted, num_rejected: what it adds to the counts of its choice. A piece that has nothing
    to show yet carries its counts alone.
    """

    index: int
    text: str
    finish_reason: str | None = None
    tokens: tuple[TokenInfo, ...] = ()
    num_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0

    @property
    def is_shown(self) -> bool:
        return bool(self.text or self.finish_reason or self.tokens)

    def followed_by(self, other: Delta) -> Delta:
        """Both as one; they are of one choice."""
        return Delta(
            self.index,
            self.text + other.text,
            other.finish_reason,
            self.tokens + other.tokens,
            self.num_tokens + other.num_tokens,
            self.num_accepted + other.num_accepted,
            self.num_rejected + other.num_rejected,
        )


class Choice:
    """Text, tokens and counts of one choice. Mutable: owned by its generation."""

    def __init__(self, index: int, request: ChoiceRequest, vocabulary: Vocabulary) -> None:
        self.index = index
        self._request = request
        self._detokenizer = Detokenizer(
            vocabulary, request.prompt_token_ids, request.stop, shows_stop=request.shows_stop
        )
        self._hidden: list[TokenInfo] = []
        self._num_shown = 0  # characters
        self.prompt_logprobs: TokenLogprobs | None = None
        self.is_open = True
        self.finish_reason: str | None = None
        self.num_cached: int | None = None  # prompt tokens; None until its first event
        self.num_tokens = 0
        self.num_rejected = 0
        self.drafted_per_position: list[int] = []
        self.accepted_per_position: list[int] = []
        self.first_token_seconds: float | None = None
        self.last_token_seconds = 0.0
        self.queue_seconds = 0.0  # from its arrival at the engine to its first admission

    @property
    def is_waiting(self) -> bool:
        """Nothing was generated yet."""
        return self.is_open and self.first_token_seconds is None

    def take(self, event: TokenEvent) -> Delta:
        """The tokens of one step as text. A token that ends the output counts; it is shown if asked for."""
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.num_cached is not None:
            self.num_cached = event.num_cached
        if not self._request.shows_output:
            return self._delta("", _reason_unseen(event), NOTHING)
        hides_last = event.finish_reason is FinishReason.STOP and not self._request.shows_stop
        shown = event.token_ids[:-1] if hides_last else event.token_ids
        decoded = self._push(shown, event)
        added = self._count(event, decoded.num_tokens if decoded.is_stopped else len(event.token_ids))
        if decoded.is_stopped or event.finish_reason is None:
            reason = "stop" if decoded.is_stopped else None
            return self._delta(decoded.text, reason, added, cuts=decoded.is_stopped)
        rest = self._detokenizer.flush()
        reason = "stop" if rest.is_stopped else event.finish_reason.value
        return self._delta(decoded.text + rest.text, reason, added, cuts=rest.is_stopped)

    def _push(self, token_ids: list[int], event: TokenEvent) -> Decoded:
        if not self._request.wants_tokens:
            return self._detokenizer.push(token_ids)
        text: list[str] = []
        for i, token_id in enumerate(token_ids):
            start = self._detokenizer.num_characters
            decoded = self._detokenizer.push([token_id])
            self._hidden.append(_token_info(event, i, start))
            text.append(decoded.text)
            if decoded.is_stopped:
                return Decoded("".join(text), i + 1, is_stopped=True)
        return Decoded("".join(text), len(token_ids))

    def _delta(self, text: str, finish_reason: str | None, added: Added, *, cuts: bool = False) -> Delta:
        self.is_open = finish_reason is None
        self.finish_reason = finish_reason
        self._num_shown += len(text)
        tokens: tuple[TokenInfo, ...] = ()
        if self._hidden:
            tokens = tuple(self._release(shows_all=finish_reason is not None and not cuts))
        return Delta(self.index, text, finish_reason, tokens, *added)

    def _release(self, *, shows_all: bool) -> Iterator[TokenInfo]:
        """Takes the tokens out whose text begins before the end of what is shown."""
        num_ready = len(self._hidden)
        if not shows_all:
            num_ready = sum(token.start < self._num_shown for token in self._hidden)
        released, self._hidden = self._hidden[:num_ready], self._hidden[num_ready:]
        yield from released

    def _count(self, event: TokenEvent, num_tokens: int) -> Added:
        num_accepted, num_rejected = (
            min(event.num_accepted, num_tokens),
            event.num_drafted - event.num_accepted,
        )
        self.num_tokens += num_tokens
        self.num_rejected += num_rejected
        _count_up(self.drafted_per_position, event.num_drafted)
        _count_up(self.accepted_per_position, num_accepted)
        self.last_token_seconds = time.monotonic()
        if self.first_token_seconds is None and num_tokens:
            self.first_token_seconds = self.last_token_seconds
        return num_tokens, num_accepted, num_rejected


def _reason_unseen(event: TokenEvent) -> str | None:
    """Where no token is part of the answer none can stop it."""
    reason = FinishReason.LENGTH if event.finish_reason is FinishReason.STOP else event.finish_reason
    return reason.value if reason else None


def _count_up(per_position: list[int], number: int) -> None:
    """One more at the first `number` positions."""
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
    """[prefill's token, draft 1, draft 2, bonus] with draft_start 1 and num_accepted 2 -> 0, 1, 2, 0."""
    place = i - event.draft_start
    return place + 1 if 0 <= place < event.num_accepted else 0
