"""Answers of Anthropic's Messages API: the parts of a chat's answer as blocks of content, whole or as
events."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw

from headway.server.formats import Content, Reasoning
from headway.server.generation.choice import Delta
from headway.server.generation.choice_output import NumberedCall, Part, without_gaps
from headway.server.http.sse import escape_line_ends
from headway.server.protocol.messages_api import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessagesAnswer,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputTokensDetails,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from headway.server.requests.answer import Answer, collect

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class MessageWriter:
    """Writes one answer. is_cut: max_tokens exceeds the room in the context. shows_thinking: the answer
    has blocks of thinking. omits_thinking: these blocks have no text."""

    answer: Answer
    is_cut: bool
    shows_thinking: bool = True
    omits_thinking: bool = False

    async def message(self) -> MessagesAnswer:
        (delta,) = await collect(self.answer)
        ending = self._ending(delta)
        blocks = [self._block(part) for part in without_gaps(self._parts(delta))]
        return self._message(blocks, ending.stop_reason, ending.stop_sequence)

    async def events(self) -> AsyncGenerator[bytes, None]:
        blocks = BlockEvents(omits_thinking=self.omits_thinking)
        is_first = True
        async with self.answer.running() as deltas:
            async for delta in deltas:
                if is_first:
                    yield event(MessageStart(self._message([])))
                    is_first = False
                for told in blocks.of(self._parts(delta)):
                    yield event(told)
                if delta.finish_reason is not None:
                    for told in blocks.end():
                        yield event(told)
                    yield event(MessageDelta(self._ending(delta), self._usage()))
        yield event(MessageStop())

    def _message(
        self, blocks: list[AnswerBlock], stop_reason: str | None = None, stop_sequence: str | None = None
    ) -> MessagesAnswer:
        head = self.answer.head
        return MessagesAnswer(head.id, head.model, blocks, self._usage(), stop_reason, stop_sequence)

    def _usage(self) -> MessagesUsage:
        """Returns the usage so far."""
        usage = self.answer.usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        thinking = usage.completion_tokens_details.reasoning_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=UNSET if thinking is UNSET else OutputTokensDetails(thinking),
        )

    def _parts(self, delta: Delta) -> Iterator[Part]:
        """Yields the visible parts of a delta, without empty texts."""
        parts: Iterable[Part] = (Content(delta.text),) if delta.parts is None else delta.parts
        for part in parts:
            if isinstance(part, NumberedCall) or (
                part.text and (self.shows_thinking or isinstance(part, Content))
            ):
                yield part

    def _block(self, part: Part) -> AnswerBlock:
        if isinstance(part, Reasoning):
            return ThinkingBlock("" if self.omits_thinking else part.text, _signature(part.text))
        if isinstance(part, Content):
            return TextBlock(part.text)
        return ToolUseBlock(_call_id(part), part.name, Raw(part.arguments.encode()))

    def _ending(self, delta: Delta) -> Ending:
        """Returns how the answer ended. A stop string of the chat template counts as the model's own end."""
        reason = delta.finish_reason
        assert reason is not None, delta
        if reason == "stop" and delta.stop_reason in self.answer.fields.stop_strings:
            return Ending("stop_sequence", str(delta.stop_reason))
        if reason == "length":
            return Ending("model_context_window_exceeded" if self.is_cut else "max_tokens", None)
        return Ending(STOP_REASONS[reason], None)


class BlockEvents:
    """Writes parts as events, with one block for neighbours of one kind. Mutable: the kind of the open
    block."""

    def __init__(self, *, omits_thinking: bool = False) -> None:
        self._omits_thinking = omits_thinking
        self._open: type[Reasoning | Content] | None = None
        self._index = 0
        self._thoughts = hashlib.sha256()

    def of(self, parts: Iterable[Part]) -> Iterator[Event]:
        for part in parts:
            if isinstance(part, NumberedCall):
                yield from self.end()
                yield BlockStart(self._index, ToolUseBlock(_call_id(part), part.name, Raw(b"{}")))
                yield BlockDelta(self._index, InputJsonDelta(part.arguments))
                yield BlockStop(self._index)
                self._index += 1
                continue
            if type(part) is not self._open:
                yield from self._begin(type(part))
            yield from self._more(part)

    def end(self) -> Iterator[Event]:
        """Closes the open block."""
        if self._open is None:
            return
        if self._open is Reasoning:
            yield BlockDelta(self._index, SignatureDelta(self._thoughts.hexdigest()))
        yield BlockStop(self._index)
        self._open = None
        self._index += 1

    def _begin(self, kind: type[Reasoning | Content]) -> Iterator[Event]:
        yield from self.end()
        self._open, self._thoughts = kind, hashlib.sha256()
        yield BlockStart(self._index, ThinkingBlock("", "") if kind is Reasoning else TextBlock(""))

    def _more(self, part: Reasoning | Content) -> Iterator[Event]:
        if isinstance(part, Content):
            yield BlockDelta(self._index, TextDelta(part.text))
            return
        self._thoughts.update(_encoded(part.text))
        if not self._omits_thinking:
            yield BlockDelta(self._index, ThinkingDelta(part.text))


def event(told: Event) -> bytes:
    name = str(told.__struct_config__.tag).encode()
    return b"event: %s\ndata: %s\n\n" % (name, escape_line_ends(msgspec.json.encode(told)))


def _signature(thoughts: str) -> str:
    return hashlib.sha256(_encoded(thoughts)).hexdigest()


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _call_id(call: NumberedCall) -> str:
    return "toolu_" + call.call_id.removeprefix("call_")
