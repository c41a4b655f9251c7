"""Calls that are written as a Python list of calls."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headway.server.formats.arguments import MAX_NAME, Schemas, Tell, literal, object_of
from headway.server.formats.cursor import Cursor, NoCallError, Wait, optional, repeated
from headway.server.formats.pieces import ToolCall

_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[()\[\]{},]', re.DOTALL)
_CONTROLS = re.compile(r"[\n\r\t]")


@dataclass(frozen=True)
class PythonicCalls:
    """`[name(key=value), ...]`: Llama 4 and the small models of Llama 3.2, at the beginning of the answer
    or after a token."""

    openers: tuple[str, ...] = ("<|python_start|>",)
    closer: str = "<|python_end|>"
    starts: tuple[str, ...] = ("[",)

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        if opener in self.starts:
            cursor.position -= len(opener)
        yield from cursor.space()
        start = cursor.position
        yield from cursor.expect("[")
        yield from cursor.space()
        if (yield from cursor.until("(", limit=MAX_NAME)).strip() not in schemas:
            raise NoCallError
        cursor.position = start
        calls = _calls_of((yield from cursor.balanced("[", "\"'")))
        if any(call.name not in schemas for call in calls):
            raise NoCallError
        yield from optional(cursor, self.closer)
        for call in calls:
            tell(call)
        yield from repeated(cursor, "]", self.closer)


def _calls_of(text: str) -> list[ToolCall]:
    """Returns the calls of a list. Names need not be valid in Python: a tool may be `get-time`, and a
    parameter `from`."""
    calls = []
    for call in _items(text):
        name, opened, arguments = call.partition("(")
        if not opened or not arguments.endswith(")"):
            raise NoCallError
        values: dict[str, str] = {}
        for argument in _items(opened + arguments):
            key, _, value = argument.partition("=")
            if not key.rstrip().isidentifier():
                raise NoCallError
            values[key.rstrip()] = _value(value)
        calls.append(ToolCall(name.strip(), object_of(values)))
    return calls


def _value(text: str) -> str:
    """Returns a value as JSON. Its strings may contain unescaped line breaks and tabs."""
    try:
        return literal(text)
    except NoCallError:
        return literal(_CONTROLS.sub(lambda found: repr(found[0])[1:-1], text))


def _items(text: str) -> list[str]:
    """Returns the texts between the commas within a pair of brackets that encloses the whole text; the
    last item may be empty. Raises NoCallError if the text is more than that pair."""
    items, depth, start = list[str](), 0, 1
    for match in _TOKENS.finditer(text):
        token = match.group()
        if depth == 0 and match.start():
            raise NoCallError
        depth += (token in "([{") - (token in ")]}")
        if (token == "," and depth == 1) or depth == 0:
            items.append(text[start : match.start()].strip())
            start = match.end()
    return items if items and items[-1] else items[:-1]
