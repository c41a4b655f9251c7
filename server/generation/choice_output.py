"""The parts of a choice's text: reasoning, content and calls of tools, by the format of the model's
output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Any

from headway.engine import Thinking
from headway.server.formats import Content, OutputFormat, Piece, Reasoning, ToolCall
from headway.server.formats.call_ids import new_call_id
from headway.server.generation.content_stops import ContentStops, StopOptions


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A call of a tool. index: its number among the choice's calls, from 0. arguments: JSON."""

    index: int
    call_id: str
    name: str
    arguments: str


Text = Reasoning | Content
Part = Text | NumberedCall


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How a choice's text is parsed. prompt: the text that it continues. tools: in OpenAI's form; None if
    calls are content like any other text.

    is_single_call: the choice ends with its first call. thinking: the token ids where reasoning begins and
    ends; None for a model that does not reason. draws: the generator of call ids.
    """

    format: OutputFormat
    prompt: str
    tools: Sequence[dict[str, Any]] | None = None
    is_single_call: bool = False
    thinking: Thinking | None = None
    draws: Random = field(default_factory=SystemRandom, compare=False, repr=False)

    @property
    def counts_reasoning(self) -> bool:
        """Returns whether reasoning tokens can be counted: its delimiters are single tokens, or there is
        no reasoning."""
        if self.format.thinking_end is None or self.thinking is None:
            return self.format.thinking_end is not None
        begins = self.thinking.is_open or self.thinking.start_id is not None
        return begins and len(self.thinking.end_ids) == 1

    @property
    def shown_tokens(self) -> frozenset[str]:
        """Returns the special tokens that must be part of the text, because they delimit parts of it."""
        thinking = (delimiter for pair in self.format.thinking for delimiter in pair)
        return frozenset(
            thinking if self.tools is None and not self.format.is_harmony else self.format.delimiters
        )


class ChoiceOutput:
    """Splits one choice's text into its parts. Mutable: owned by its choice."""

    def __init__(self, options: OutputOptions, stops: StopOptions | None = None) -> None:
        self._stops = ContentStops(stops or StopOptions(), is_single_call=options.is_single_call)
        self._parser = options.format.parser(options.prompt, options.tools)
        self._is_single_call = options.is_single_call
        calls = options.format.calls if options.tools else None
        self._openers = () if calls is None else calls.openers
        self._call_id_length = options.format.call_id_length
        self._draws = options.draws
        self.num_calls = 0
        self.num_malformed = 0  # openers of calls that became content

    @property
    def may_complete(self) -> bool:
        """Returns whether the choice may end with a part of its text."""
        return self._is_single_call or self._stops.is_used

    @property
    def is_complete(self) -> bool:
        """Returns whether no more text may follow."""
        return self.stop is not None or (self._is_single_call and self.num_calls > 0)

    @property
    def stop(self) -> str | int | None:
        """Returns the stop string, or the id of the stop token, that has ended the content."""
        return self._stops.stop

    def feed(self, text: str) -> tuple[Part, ...]:
        """Returns the parts that are certain now; nothing after the last call that is allowed."""
        return self._parts(self._stops.take(self._parser.feed(text))) if text and not self.is_complete else ()

    def feed_token(self, token_id: int, text: str, start: int) -> tuple[Part, ...]:
        """Feeds the text of one token. text: everything that becomes certain with the token. start: the
        index of the token's own text."""
        return () if self.is_complete else self._parts(self._stops.feed(token_id, text, start, self._parser))

    def finish(self, *, is_cut: bool = False) -> tuple[Part, ...]:
        """Returns the rest at the end of the text. is_cut: a limit ended it, not the model."""
        if self.is_complete:
            return ()
        return self._parts(self._stops.take(self._parser.finish(is_cut=is_cut), is_last=True))

    def _parts(self, pieces: Iterable[Piece]) -> tuple[Part, ...]:
        return tuple(self._numbered(pieces))

    def _numbered(self, pieces: Iterable[Piece]) -> Iterator[Part]:
        for piece in pieces:
            if not isinstance(piece, ToolCall):
                if isinstance(piece, Content):
                    self.num_malformed += sum(piece.text.count(opener) for opener in self._openers)
                yield piece
                continue
            call_id = new_call_id(self._call_id_length, self._draws)
            yield NumberedCall(self.num_calls, call_id, piece.name, piece.arguments)
            self.num_calls += 1
            if self._is_single_call:
                return


class ReasoningCounter:
    """Counts the tokens of a choice's reasoning without its delimiters. Mutable: owned by its choice."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._end_ids = [] if thinking is None else thinking.end_ids
        self._start_id = None if thinking is None else thinking.start_id
        self._is_open = thinking is not None and thinking.is_open
        self._is_first = True
        self._last_ids: list[int] = []

    def count(self, token_ids: Sequence[int]) -> int:
        """Returns how many more tokens of the output are reasoning; negative if earlier ones turn out to
        belong to the closing delimiter."""
        if not (self._is_open or self._is_first):
            return 0
        return sum(self._take(token_id) for token_id in token_ids)

    def _take(self, token_id: int) -> int:
        is_first, self._is_first = self._is_first, False
        if not self._is_open:
            self._is_open = is_first and token_id == self._start_id
            return 0
        self._last_ids = [*self._last_ids, token_id][-len(self._end_ids) :]
        if self._last_ids != self._end_ids:
            return 1
        self._is_open = False
        return 1 - len(self._end_ids)


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts, with neighbours of one kind joined if no text of the output lies between them."""
    return _joined(parts, lambda last, part: part.start == last.start + len(last.text))


def without_gaps(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Returns the parts, with neighbours of one kind joined whatever the output has between them."""
    return _joined(parts, lambda last, part: True)


def _joined(parts: Iterable[Part], belong: Callable[[Text, Text], bool]) -> tuple[Part, ...]:
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Reasoning) and isinstance(last, Reasoning) and belong(last, part):
            found[-1] = Reasoning(last.text + part.text, last.start)
        elif isinstance(part, Content) and isinstance(last, Content) and belong(last, part):
            found[-1] = Content(last.text + part.text, last.start)
        else:
            found.append(part)
    return tuple(found)
