"""Parses a text that arrives in pieces as if it were whole.

The parsing functions are generators: each yields when it needs more text to decide, and goes on when more has
arrived. A decision depends on the text alone, so that any split into pieces gives the same result.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence

Wait = Generator[None, None, None]
OPENING = {")": "(", "]": "[", "}": "{"}
_SPACE = re.compile(r"\s*")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_OUTSIDE = {'"': re.compile(r'[^"{}\[\]]*'), "\"'": re.compile(r"[^\"'{}\[\]()]*")}


class NoCallError(Exception):
    """The text at the cursor is not what the format requires there, or it ends too early."""


class Cursor:
    """A position in a text that may still grow. Mutable: the parsing functions move `position`; the parser
    calls `feed` and `end`.

    mark: an index into `text`, never after `position`; everything before it has been emitted. num_forgotten:
    the number of characters before `text`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self.mark = 0
        self.num_forgotten = 0
        self.is_ended = False

    def feed(self, text: str) -> None:
        self.text += text

    def forget(self) -> None:
        """Drops the text before the mark. Only a function that holds no position of its own may call it."""
        self.text = self.text[self.mark :]
        self.num_forgotten += self.mark
        self.position -= self.mark
        self.mark = 0

    @property
    def rest(self) -> str:
        """Returns the text after the cursor."""
        return self.text[self.position :]

    def space(self) -> Wait:
        """Moves over all whitespace."""
        while True:
            match = _SPACE.match(self.text, self.position)
            assert match is not None
            self.position = match.end()
            if self.position < len(self.text) or self.is_ended:
                return
            yield

    def option(self, *literals: str) -> Generator[None, None, str | None]:
        """Moves over the longest of the literals that comes next, and returns it; returns None if none
        does."""
        while True:
            rest = self.text[self.position : self.position + max(map(len, literals))]
            if self.is_ended or not any(len(one) > len(rest) and one.startswith(rest) for one in literals):
                found = max((one for one in literals if rest.startswith(one)), key=len, default=None)
                self.position += len(found or "")
                return found
            yield

    def expect(self, *literals: str) -> Generator[None, None, str]:
        """Moves over one of the literals. Raises NoCallError if none comes next."""
        found = yield from self.option(*literals)
        if found is None:
            raise NoCallError
        return found

    def until(self, *stops: str, limit: int | None = None) -> Generator[None, None, str]:
        """Returns the text before the first stop and moves to the stop. Raises NoCallError if there is
        none within `limit` characters."""
        longest = max(map(len, stops))
        searched = self.position
        while True:
            found = [at for stop in stops if (at := self.text.find(stop, searched)) >= 0]
            if found and (self.is_ended or min(found) + longest <= len(self.text)):
                break
            searched = max(searched, min([*found, len(self.text) - longest + 1]))
            if self.is_ended or (limit is not None and searched - self.position > limit):
                if limit is None:
                    self.position = len(self.text)
                raise NoCallError
            yield
        if limit is not None and min(found) - self.position > limit:
            raise NoCallError
        before, self.position = self.text[self.position : min(found)], min(found)
        return before

    def balanced(self, brackets: str, quotes: str = '"') -> Generator[None, None, str]:
        """Returns the text from a bracket that comes next to its closing one; strings between the quotes may
        contain anything.

        brackets: those that may come next. Raises NoCallError, with the cursor after it, at a bracket that
        does not match.
        """
        start = at = self.position
        yield from self._available(at)
        if self.text[at] not in brackets:
            raise NoCallError
        nesting: list[str] = []
        while True:
            at = yield from self._after(_OUTSIDE[quotes], at)
            character = self.text[at]
            at += 1
            if character in quotes:
                at = yield from self._string_end(at, character)
            elif character not in OPENING:
                nesting.append(character)
            elif nesting.pop() != OPENING[character]:
                self.position = at
                raise NoCallError
            if not nesting:
                self.position = at
                return self.text[start:at]

    def _string_end(self, at: int, quote: str) -> Generator[None, None, int]:
        while True:
            at = yield from self._after(_IN_STRING[quote], at)
            if self.text[at] == quote:
                return at + 1
            yield from self._available(at + 1)
            at += 2

    def _after(self, pattern: re.Pattern[str], at: int) -> Generator[None, None, int]:
        """Returns the index of the first character that the pattern does not match."""
        while True:
            match = pattern.match(self.text, at)
            assert match is not None
            at = match.end()
            if at < len(self.text):
                return at
            yield from self._available(at)

    def _available(self, at: int) -> Wait:
        """Waits for the character at this index. Raises NoCallError, with the cursor at the end, if the
        text ends before."""
        while at >= len(self.text):
            if self.is_ended:
                self.position = len(self.text)
                raise NoCallError
            yield


class Markers:
    """Literals that are searched in free text."""

    def __init__(self, literals: Sequence[str]) -> None:
        self._pattern = re.compile(
            "|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)"
        )
        self._prefixes = {literal[:n] for literal in literals for n in range(1, len(literal))}
        self._max_held = max(map(len, literals), default=1) - 1

    def find(self, text: str, position: int) -> re.Match[str] | None:
        return self._pattern.search(text, position)

    def num_held(self, text: str, position: int) -> int:
        """Returns the length of the longest end of the text that could begin a marker. Only the text after
        `position` counts."""
        most = min(self._max_held, len(text) - position)
        return next((n for n in range(most, 0, -1) if text[-n:] in self._prefixes), 0)


def optional(cursor: Cursor, *literals: str) -> Generator[None, None, str | None]:
    """Moves over whitespace and one of the literals, and returns it; stays if none comes next."""
    start = cursor.position
    yield from cursor.space()
    found = yield from cursor.option(*literals)
    if found is None:
        cursor.position = start
    return found


def follows(cursor: Cursor, *literals: str) -> Generator[None, None, str | None]:
    """Returns the literal that comes next after whitespace, and does not move."""
    start = cursor.position
    found = yield from optional(cursor, *literals)
    cursor.position = start
    return found


def closed(
    cursor: Cursor, closer: str, *surplus: str, another: str | None = None
) -> Generator[None, None, bool]:
    """Moves over the closer, if it comes next, and over surplus texts before it. Stays if something else
    follows; the end of the text closes, too. Returns whether `another` follows instead, to which the
    cursor then moves."""
    start = cursor.position
    while True:
        yield from cursor.space()
        found = yield from cursor.option(closer, *surplus, *([another] if another else ()))
        if found is None and (cursor.rest or not cursor.is_ended):
            cursor.position = start
        if found is not None and found == another:
            cursor.position -= len(found)
            return True
        if found is None or found == closer:
            return False


def repeated(cursor: Cursor, *closers: str) -> Wait:
    """Moves over any repeated closers."""
    while (yield from optional(cursor, *closers)):
        pass


def skip_all(cursor: Cursor, *literals: str) -> Wait:
    """Moves over whitespace and the literals, in any number."""
    yield from cursor.space()
    while (yield from cursor.option(*literals)):
        yield from cursor.space()


def object_or_null(cursor: Cursor) -> Generator[None, None, str]:
    """Returns the text of an object, or `null`, which means an empty one."""
    return (yield from cursor.option("null")) or (yield from cursor.balanced("{"))
