"""Splits a model's output into reasoning, content and calls while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from headway.server.formats.arguments import schemas_of
from headway.server.formats.calls import CallForm, JsonCalls, PythonicCalls
from headway.server.formats.cursor import Cursor, Markers, NoCallError, Wait
from headway.server.formats.pieces import Content, Piece, Reasoning, ToolCall


class TextSink:
    """Collects one kind of text. Mutable: the parser writes it. Whitespace is held back until text follows it.

    Whitespace before the first text, and after the last before a delimiter, frames the delimiters and is left out.
    write: takes a text and its start.
    """

    def __init__(self, write: Callable[[str, int], None], *, keeps_leading: bool) -> None:
        self._write = write
        self._space: list[tuple[str, int]] = []  # held back, each with its start
        self.keeps_leading = keeps_leading
        self.has_text = False
        self._is_framed = False

    def take(self, cursor: Cursor, begin: int, end: int) -> None:
        """Takes a part of the cursor's text."""
        text, start = cursor.text[begin:end], cursor.num_forgotten + begin
        body = text.strip()
        self._is_framed = self._is_framed and not body
        if not body:
            self._hold(text, start)
            return
        leading = text[: text.index(body)]
        self._hold(leading, start)
        if self.has_text or self.keeps_leading:
            self._release()
        self._space = []
        self.has_text = True
        self._write(body, start + len(leading))
        self._hold(text[len(leading) + len(body) :], start + len(leading) + len(body))

    @property
    def held(self) -> str:
        """Whitespace that is a part of the text if more of it follows."""
        return "".join(space for space, _ in self._space)

    def _hold(self, space: str, start: int) -> None:
        if space:
            self._space.append((space, start))

    def _release(self) -> None:
        for space, start in self._space:
            self._write(space, start)

    def frame(self) -> None:
        """A delimiter came. Whitespace before it, and at the end of the text after it, is no part of the text."""
        self._is_framed = True
        self.keeps_leading = False

    def end(self) -> None:
        """The text ended. Whitespace at its end is a part of it, unless a delimiter came after the text."""
        if not self._is_framed and (self.has_text or self.keeps_leading):
            self._release()
        self._space = []


class StreamParser:
    """Parses the output of one choice. Mutable: fed by the writer of the choice alone.

    thinking: how reasoning is delimited. is_thinking: the prompt has opened it. calls_end_thinking: calls at the end of reasoning
    that was not closed are calls; elsewhere in it they are drafts, and are reasoning.
    """

    def __init__(
        self,
        calls: CallForm | None,
        thinking: Sequence[tuple[str, str]],
        tools: Sequence[dict[str, Any]] | None,
        *,
        open_thinking: str | None,
        calls_end_thinking: bool,
    ) -> None:
        self._calls = calls if tools else None
        self._thinking = dict(thinking)
        self._schemas = schemas_of(tools)
        self._openers = self._calls.openers if self._calls else ()
        self._starts = self._calls.starts if isinstance(self._calls, JsonCalls | PythonicCalls) else ()
        self._markers = Markers(self._openers)
        self._calls_end_thinking = calls_end_thinking
        self._cursor = Cursor()
        self._pieces: list[Piece] = []
        self._content = TextSink(
            lambda text, start: self._pieces.append(Content(text, start)), keeps_leading=open_thinking is None
        )
        self.is_in_content = open_thinking is None
        self._reader = self._read(open_thinking)
        self._is_done = False

    @property
    def held_content(self) -> str:
        return self._content.held + self._cursor.text[self._cursor.mark :]

    def feed(self, text: str) -> list[Piece]:
        """Returns what is certain after this cut of the output."""
        self._cursor.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """Returns the rest. A call that is not complete is content. Never raises."""
        self._cursor.is_ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if not self._is_done:
            self._is_done = next(self._reader, self) is self
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self, open_thinking: str | None) -> Wait:
        if open_thinking is not None:
            yield from self._read_thinking(self._thinking[open_thinking])
            self.is_in_content = True
        while (marker := (yield from self._next_marker())) is not None:
            self.is_in_content = False
            if marker in self._thinking:
                self._content.frame()
                yield from self._read_thinking(self._thinking[marker])
            else:
                yield from self._read_calls(marker)
            self.is_in_content = True
        self._content.end()

    def _next_marker(self) -> Generator[None, None, str | None]:
        """Returns the next delimiter in the content. Reasoning, and calls without an opener, only begin before all content."""
        cursor, first = self._cursor, (*self._openers, *self._starts, *self._thinking)
        if first and not self._content.has_text:
            yield from cursor.space()
            space_end = cursor.position
            marker = yield from cursor.option(*first)
            self._content.take(cursor, cursor.mark, space_end)
            cursor.mark = space_end
            if marker is not None:
                return marker
        return (yield from self._until(self._markers, self._content))

    def _until(self, markers: Markers, sink: TextSink) -> Generator[None, None, str | None]:
        """Passes text on until a marker has come, or the end of the text, and moves over the marker."""
        cursor = self._cursor
        while True:
            match = markers.find(cursor.text, cursor.position)
            num_held = 0 if match or cursor.is_ended else markers.num_held(cursor.text, cursor.position)
            end = match.start() if match else len(cursor.text) - num_held
            sink.take(cursor, cursor.position, end)
            cursor.mark = cursor.position = end
            cursor.forget()
            if match:
                cursor.position = len(match.group())
                return match.group()
            if cursor.is_ended:
                return None
            yield

    def _read_calls(self, opener: str) -> Wait:
        """Tells the calls that begin at the opener. From the mark on, what is none is content; an opener alone at the end is nothing."""
        assert self._calls is not None
        cursor = self._cursor
        try:
            yield from self._calls.read(cursor, opener, self._schemas, self._tell)
            cursor.mark = cursor.position
        except NoCallError:
            rest = cursor.text[cursor.mark :]
            if cursor.is_ended and rest.strip() == opener and opener not in self._starts:
                cursor.position = len(cursor.text)
            else:
                self._content.take(cursor, cursor.mark, cursor.position)
            cursor.mark = cursor.position

    def _tell(self, call: ToolCall) -> None:
        self._content.frame()
        self._pieces.append(call)
        self._cursor.mark = self._cursor.position

    def _read_thinking(self, closer: str) -> Wait:
        sink = TextSink(lambda text, start: self._pieces.append(Reasoning(text, start)), keeps_leading=False)
        markers = Markers([closer, *(self._openers if self._calls_end_thinking else ())])
        while True:
            marker = yield from self._until(markers, sink)
            if marker == closer:
                self._cursor.mark = self._cursor.position
                return
            if marker is None:
                sink.end()
                return
            if (yield from self._read_last_calls(marker, sink)):
                return

    def _read_last_calls(self, opener: str, sink: TextSink) -> Generator[None, None, bool]:
        """Tells the calls that end the reasoning and the whole text; returns False where they are reasoning."""
        cursor, calls = self._cursor, list[ToolCall]()
        assert self._calls is not None
        found: str | None = opener
        try:
            while found is not None:
                yield from self._calls.read(cursor, found, self._schemas, calls.append)
                yield from cursor.space()
                found = yield from cursor.option(*self._openers)
            is_last = cursor.is_ended and not cursor.rest
        except NoCallError:
            is_last = False
        if is_last:
            for call in calls:
                self._tell(call)
        else:
            sink.take(cursor, cursor.mark, cursor.position)
            cursor.mark = cursor.position
        return is_last
