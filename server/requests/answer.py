"""An answer in progress, of any endpoint: collected into one body, or sent as a stream of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from headway.server.base.continuation import Continuation, continuation_of
from headway.server.base.errors import NO_RETRY, ApiError
from headway.server.generation.choice import ChoiceRequest, Delta
from headway.server.generation.choice_output import OutputOptions, joined
from headway.server.generation.generation import Generation
from headway.server.http.sse import DONE, KEEP_ALIVE, EventStreamResponse, escape_line_ends
from headway.server.protocol.parameters import GenerationFields
from headway.server.protocol.usage import (
    CompletionTokensDetails,
    DraftPositions,
    PromptTokensDetails,
    SpeculationReport,
    Usage,
)
from headway.server.requests.services import Services, engine_info, request_id_of, system_fingerprint
from headway.server.text.detokenizer import Vocabulary
from headway.server.text.tokenizer import Tokenizer

# From a delta, and whether it is its choice's first, to the entries of `choices`, one chunk each.
ChunkChoices = Callable[[Delta, bool], Sequence[msgspec.Struct]]


class ChunkHeader(msgspec.Struct):
    """The fields that every chunk of a response repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Answer:
    """request_id: the id of the HTTP request. depth: the most drafts a round that a request may get.
    output: how the choices' texts are split into parts; None for text alone. continuation: where it began."""

    head: ChunkHeader
    fields: GenerationFields
    generation: Generation
    num_prompt_tokens: int
    services: Services
    request_id: str
    depth: int
    output: OutputOptions | None = None
    continuation: Continuation = field(default_factory=Continuation)

    @property
    def includes_usage(self) -> bool:
        """Returns whether a stream ends with its usage, because the request or the server wants it."""
        return self.fields.includes_usage or self.services.limits.force_include_usage

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Runs the generation and yields its deltas. Leaving, in whatever way, aborts what still runs."""
        names = (self.request_id, self.head.id)
        with self.services.running.entry(self.generation, names), self._deadline():
            async with aclosing(self.generation.deltas()) as deltas:
                yield deltas

    @contextmanager
    def _deadline(self) -> Iterator[None]:
        seconds = self.services.limits.request_seconds
        if not seconds:
            yield
            return
        message = f"the request was not done after {seconds:g} s (request_timeout); ask for fewer tokens"
        error = ApiError(message, status=504, code="request_timeout", headers=NO_RETRY)
        timer = asyncio.get_running_loop().call_later(seconds, self.generation.fail, error)
        try:
            yield
        finally:
            timer.cancel()

    def usage(self) -> Usage:
        """Returns the usage of all tokens generated so far."""
        counts = self.generation.counts()
        accepted, rejected = counts.prediction or (counts.num_accepted, counts.num_rejected)
        return self.usage_of(counts.num_completion_tokens, accepted, rejected, counts.num_reasoning)

    def usage_of(self, num_tokens: int, num_accepted: int, num_rejected: int, num_reasoning: int) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=self.num_prompt_tokens + num_tokens,
            completion_tokens_details=CompletionTokensDetails(
                num_accepted,
                num_rejected,
                num_reasoning if self.output is not None and self.output.counts_reasoning else UNSET,
            ),
            prompt_tokens_details=PromptTokensDetails(self.generation.num_cached_tokens),
        )

    def report(self) -> SpeculationReport | UnsetType:
        """Returns the report if it was requested. Its lists have an entry for each position up to the
        request's own depth."""
        speculation = self.fields.speculation
        if speculation is None or not speculation.report:
            return UNSET
        own = speculation.max_draft_tokens
        depth = self.depth if own is None else min(own, self.depth)
        counts = self.generation.counts()
        return SpeculationReport(
            max_draft_tokens=depth,
            drafted_per_position=_padded(counts.drafted_per_position, depth),
            accepted_per_position=_padded(counts.accepted_per_position, depth),
            estimated_speedup=counts.estimated_speedup,
        )


def draft_positions(fields: GenerationFields, delta: Delta, *, offset: int = 0) -> DraftPositions | UnsetType:
    """Returns the draft positions of the delta's tokens; UNSET if not requested. offset: characters of the
    choice's text before the generated ones."""
    if not fields.wants_draft_positions:
        return UNSET
    return DraftPositions(
        [token.draft_position for token in delta.tokens], [offset + token.start for token in delta.tokens]
    )


def _padded(counts: list[int], length: int) -> list[int]:
    return counts + [0] * (length - len(counts))


def new_answer(
    head: ChunkHeader,
    fields: GenerationFields,
    requests: Sequence[ChoiceRequest],
    num_prompt_tokens: int,
    services: Services,
    request: Request,
) -> Answer:
    """Returns an answer whose generation has not started; `running` starts it."""
    request_id, continuation = request_id_of(request), continuation_of(request)
    output = requests[0].output
    vocabulary = _vocabulary(fields, services.tokenizer, output)
    generation = Generation(
        services.engine,
        vocabulary,
        requests,
        metrics=services.metrics,
        label=request_id,
        continuation=continuation if fields.stream else None,
    )
    depth = engine_info(services).depth
    return Answer(
        head, fields, generation, num_prompt_tokens, services, request_id, depth, output, continuation
    )


def _vocabulary(fields: GenerationFields, tokenizer: Tokenizer, output: OutputOptions | None) -> Vocabulary:
    """Returns the vocabulary for the text, in which special tokens that delimit parts are text, too."""
    if fields.skip_special_tokens is False:
        return tokenizer.full_vocabulary
    return tokenizer.vocabulary if output is None else tokenizer.vocabulary_showing(output.shown_tokens)


def new_header(prefix: str, kind: str, services: Services, request: Request) -> ChunkHeader:
    """prefix, kind: the prefix of the answer's id, and the name of its kind of object, as OpenAI has them."""
    continuation = continuation_of(request)
    name = f"{prefix}{continuation.draws('id').randbytes(12).hex()}"
    created = continuation.created_unix
    return ChunkHeader(name, kind, created, services.model_name, system_fingerprint(services))


def event_stream(
    answer: Answer,
    events: AsyncGenerator[bytes, None],
    *,
    keep_alive: bytes = KEEP_ALIVE,
    error_event: Callable[[ApiError], bytes] | None = None,
) -> EventStreamResponse:
    """Returns the response that streams an answer as these events."""
    return EventStreamResponse(
        events,
        keep_alive_seconds=answer.services.limits.keep_alive_seconds,
        keep_alive=keep_alive,
        error_event=error_event,
        journal=answer.generation.journal,
    )


async def collect(answer: Answer) -> list[Delta]:
    """Returns the whole text of each choice as one delta."""
    parts: dict[int, list[Delta]] = {}
    async with answer.running() as deltas:
        async for delta in deltas:
            parts.setdefault(delta.index, []).append(delta)
    return [_joined(parts[index]) for index in sorted(parts)]


def _joined(deltas: Sequence[Delta]) -> Delta:
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    text, last = "".join(delta.text for delta in deltas), deltas[-1]
    parts = None if last.parts is None else joined(part for delta in deltas for part in delta.parts or ())
    return Delta(last.index, text, last.finish_reason, tokens, stop_reason=last.stop_reason, parts=parts)


async def chunk_events(answer: Answer, choices_of: ChunkChoices) -> AsyncGenerator[bytes, None]:
    """Yields the `data:` lines. Chunks differ in choices and usage only; the rest is encoded once."""
    head = _json(answer.head)[:-1]
    fields = answer.fields
    usage = b',"usage":null' if answer.includes_usage else b""
    started: set[int] = set()
    sent = [0, 0, 0, 0]  # tokens, accepted and rejected ones, tokens of reasoning
    async with answer.running() as deltas:
        async for delta in deltas:
            if fields.has_continuous_usage:
                added = delta.num_tokens, delta.num_accepted, delta.num_rejected, delta.num_reasoning
                sent = [total + more for total, more in zip(sent, added, strict=True)]
                usage = b',"usage":' + _json(answer.usage_of(*sent))
            if not delta.is_shown:
                continue
            is_first = delta.index not in started
            started.add(delta.index)
            for choice in choices_of(delta, is_first):
                yield b'data: %s,"choices":[%s]%s}\n\n' % (head, _json(choice), usage)
    if last := _final_chunk(answer):
        yield b'data: %s,"choices":[]%s}\n\n' % (head, last)
    yield DONE


def _final_chunk(answer: Answer) -> bytes:
    """Returns the fields of the chunk after all choices; empty if none was requested."""
    words = b""
    if answer.includes_usage:
        words += b',"usage":' + _json(answer.usage())
    if isinstance(report := answer.report(), SpeculationReport):
        words += b',"speculation":' + _json(report)
    return words


def _json(value: object) -> bytes:
    return escape_line_ends(msgspec.json.encode(value))
