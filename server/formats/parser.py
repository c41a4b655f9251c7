"""Splits a model's output into reasoning, content and calls while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

from headway.server.formats.arguments import schemas_of
from headway.server.formats.calls import CallForm, JsonCalls, PythonicCalls
from headway.server.formats.cursor import Cursor, Markers, NoCallError, Wait
from headway.server.formats.pieces import Content, Piece, Reasoning, ToolCall

_CUT_TAG = re.compile(r"\s*[<\[][^<>\[\]\s]*")
MIN_CUT = 5  # a cut delimiter with at least this many characters is no text
# Matches the beginning of a call without an opener: an object with a name (1) and perhaps its end (2), or a
# list with a name (3).
_BEGUN = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)(")?|\[\s*([\w.-]+)\s*\(')


class TextSink:
    """Collects one kind of text. Mutable: the parser writes it. Whitespace is held back until text follows
    it.

    Whitespace before the first text, and between the last text and a delimiter, belongs to the delimiters and
    is left out. write: receives a text and its start.
    """

    def __init__(self, write: Callable[[str, int], None], *, keeps_leading: bool) -> None:
        self._write = write
        self._space: list[tuple[str, int]] = []  # held back, each with its start
        self.keeps_leading = keeps_leading
        self.has_text = False
        self._is_framed = False

    def take(self, cursor: Cursor, begin: int, end: int) -> None:
        """Adds a part of the cursor's text."""
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
        """Returns whitespace that belongs to the text if more text follows."""
        return "".join(space for space, _ in self._space)

    def _hold(self, space: str, start: int) -> None:
        if space:
            self._space.append((space, start))

    def _release(self) -> None:
        for space, start in self._space:
            self._write(space, start)

    def frame(self) -> None:
        """Notes a delimiter. Whitespace before it, and at the end of the text after it, is left out."""
        self._is_framed = True
        self.keeps_leading = False

    def end(self) -> None:
        """Ends the text. Whitespace at its end belongs to it, unless a delimiter came after the text."""
        if not self._is_framed and (self.has_text or self.keeps_leading):
            self._release()
        self._space = []


class Surroundings:
    """The content before a position, as far as it matters for calls. Mutable: receives the content without
    its last whitespace."""

    def __init__(self) -> None:
        self._tail = ""
        self._backticks = ""  # trailing backticks, fewer than a fence has
        self._is_fenced = False

    def take(self, text: str) -> None:
        self._tail = (self._tail + text)[-2:] if text.strip() else self._tail
        runs = (self._backticks + text).split("```")
        self._is_fenced ^= len(runs) % 2 == 0
        self._backticks = runs[-1][len(runs[-1].rstrip("`")) :]

    @property
    def may_call(self) -> bool:
        """Returns whether an object that comes next is no part of code or of another value."""
        return not self._is_fenced and not self._tail.endswith(
            ("[", "{", "(", ",", "`", '"', "'", '":', "':")
        )


class CursorParser:
    """The common part of the parsers of one choice's output. Mutable: fed by the choice's writer alone.

    keeps_leading: whitespace before the first content is content.
    """

    def __init__(self, *, keeps_leading: bool) -> None:
        self._cursor = Cursor()
        self._pieces: list[Piece] = []
        self._content = TextSink(self._write_content, keeps_leading=keeps_leading)
        self._is_done = self._is_cut = False
        self._reader: Wait

    @property
    def held_content(self) -> str:
        return self._content.held + self._cursor.text[self._cursor.mark :]

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that are certain after this part of the output."""
        self._cursor.feed(text)
        return self._advance()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the rest. A call that is not complete is content, unless the text was cut there. Never
        raises."""
        self._is_cut = is_cut
        self._cursor.is_ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if not self._is_done:
            self._is_done = next(self._reader, self) is self
        pieces, self._pieces = self._pieces, []
        return pieces

    def _write_content(self, text: str, start: int) -> None:
        self._pieces.append(Content(text, start))


class StreamParser(CursorParser):
    """Parses the output of one choice.

    thinking: the delimiters of reasoning. open_thinking: the delimiter with which the prompt has opened it.
    calls_end_thinking: calls at the end of reasoning that was not closed are calls; elsewhere in it they are
    reasoning.
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
        super().__init__(keeps_leading=open_thinking is None)
        self._calls = calls if tools else None
        self._thinking = dict(thinking)
        self._schemas = schemas_of(tools)
        self._openers = self._calls.openers if self._calls else ()
        self._starts = self._calls.starts if isinstance(self._calls, JsonCalls | PythonicCalls) else ()
        inline = self._starts if isinstance(self._calls, JsonCalls) else ()
        self._markers = Markers((*self._openers, *inline))
        self._surroundings = Surroundings()
        self._calls_end_thinking = calls_end_thinking
        self.is_in_content = open_thinking is None
        self._reader = self._read(open_thinking)

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

    def _write_content(self, text: str, start: int) -> None:
        super()._write_content(text, start)
        self._surroundings.take(text)

    def _next_marker(self) -> Generator[None, None, str | None]:
        """Returns the next delimiter in the content. Reasoning, and calls without an opener, begin only
        before all content."""
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
        """Emits text until a marker or the end of the text, and moves over the marker."""
        cursor = self._cursor
        while True:
            match = markers.find(cursor.text, cursor.position)
            num_held = 0 if match else markers.num_held(cursor.text, cursor.position)
            if cursor.is_ended and not (self._is_cut and sink is self._content and num_held >= MIN_CUT):
                num_held = 0
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
        """Emits the calls that begin at the opener. Text from the mark on that is no call is content; an
        opener alone at the end is dropped.

        Calls without an opener that follow content must begin a line, or be all that follows.
        """
        assert self._calls is not None
        cursor, is_inline = self._cursor, opener in self._starts and self._content.has_text
        begun = cursor.position - len(opener)
        calls = list[ToolCall]()
        try:
            if is_inline and not self._surroundings.may_call:
                raise NoCallError
            tell = calls.append if is_inline and "\n" not in self._content.held else self._tell
            yield from self._calls.read(cursor, opener, self._schemas, tell)
            if calls and (yield from self._has_more()):
                raise NoCallError
            for call in calls:
                self._tell(call)
            if self._is_cut and cursor.is_ended and _CUT_TAG.fullmatch(cursor.rest):
                cursor.position = len(cursor.text)
            cursor.mark = cursor.position
        except NoCallError:
            rest = cursor.text[cursor.mark :]
            is_bare = rest.strip() == opener and opener not in self._starts
            if cursor.is_ended and (is_bare or (self._is_cut and self._is_call_begun(begun, opener))):
                self._content.frame()
                cursor.position = len(cursor.text)
            else:
                self._content.take(cursor, cursor.mark, cursor.position)
            cursor.mark = cursor.position

    def _has_more(self) -> Generator[None, None, bool]:
        """Returns whether anything but whitespace follows."""
        yield from self._cursor.space()
        return bool(self._cursor.rest)

    def _is_call_begun(self, begun: int, opener: str) -> bool:
        """Returns whether the text that ended is a call as far as it goes: after an opener, or else by the
        name of a tool."""
        match = _BEGUN.match(self._cursor.text, begun)
        if opener not in self._starts:
            return True
        if match is None:
            return False
        name, is_whole = match[1] or match[3], bool(match[2] or match[3])
        return (
            name in self._schemas
            if is_whole
            else bool(name) and any(n.startswith(name) for n in self._schemas)
        )

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
        """Emits the calls that end the reasoning and the whole text; returns False if they are reasoning."""
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
