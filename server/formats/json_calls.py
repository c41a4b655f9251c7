"""Calls whose arguments are JSON objects. Each instance of a class describes one family.

A form reads the calls that begin at one of its openers, with the cursor after the opener, and emits each call
when it is complete.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from headway.server.formats.arguments import MAX_NAME, Schemas, Tell, arguments_of, call_of
from headway.server.formats.cursor import (
    Cursor,
    NoCallError,
    Wait,
    closed,
    follows,
    object_or_null,
    optional,
    repeated,
    skip_all,
)
from headway.server.formats.pieces import ToolCall

FENCES = ("```json", "```")  # Markdown around JSON
BRACKETS = ("}", "]")
SURPLUS = (*BRACKETS, ",", ";", "```")  # surplus texts after a call


@dataclass(frozen=True)
class JsonCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen and, without delimiters, Llama
    3.

    starts: texts that begin a call without an opener at the beginning of the answer; the object must then
    name a tool of the request.
    """

    openers: tuple[str, ...]
    closer: str | None
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    starts: tuple[str, ...] = ()
    separator: str | None = None

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        if opener in self.starts:
            cursor.position -= len(opener)
        while True:
            if self.closer:
                yield from skip_all(cursor, opener, *FENCES, "[")
            else:
                yield from cursor.space()
                yield from self._look_ahead(cursor)
            text = yield from cursor.balanced("{")
            call = call_of(text, self.argument_keys, schemas, arguments_required=not self.closer)
            if not self.closer and call.name not in schemas:
                raise NoCallError
            has_more = self.closer and (yield from closed(cursor, self.closer, *SURPLUS, another="{"))
            tell(call)
            if has_more:
                continue
            yield from repeated(cursor, *((self.closer,) if self.closer else BRACKETS))
            if self.separator is None or not (yield from optional(cursor, self.separator)):
                return

    def _look_ahead(self, cursor: Cursor) -> Wait:
        """Raises NoCallError as soon as an object does not begin like a call: it is an answer in JSON,
        which is streamed."""
        start = cursor.position
        yield from cursor.expect("{")
        yield from cursor.space()
        yield from cursor.expect('"name"', '"type"', *(f'"{key}"' for key in self.argument_keys))
        cursor.position = start


@dataclass(frozen=True)
class BracketCalls:
    """Mistral: `[TOOL_CALLS]name[ARGS]{...}`, with one opener a call; earlier versions wrote `[TOOL_CALLS]
    [{"name": ..., "arguments": ...}]`."""

    openers: tuple[str, ...] = ("[TOOL_CALLS]",)
    call_id: str = "[CALL_ID]"
    arguments: str = "[ARGS]"
    is_list: bool = False  # which of the two forms a grammar enforces

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        yield from skip_all(cursor, opener)
        if (yield from cursor.option("[")):
            yield from self._read_list(cursor, schemas, tell)
            return
        name = yield from cursor.until(self.arguments, self.call_id, "{", "\n", limit=MAX_NAME)
        if (yield from cursor.option(self.call_id)):
            yield from cursor.until(self.arguments, limit=MAX_NAME)
        yield from cursor.option(self.arguments)
        yield from cursor.space()
        yield from skip_all(cursor, *FENCES)
        text = yield from object_or_null(cursor)
        yield from optional(cursor, FENCES[-1])
        tell(arguments_of(name, text, schemas) if name.strip() else call_of(text, ("arguments",), schemas))
        yield from repeated(cursor, *BRACKETS)

    def _read_list(self, cursor: Cursor, schemas: Schemas, tell: Tell) -> Wait:
        while True:
            yield from cursor.space()
            text = yield from cursor.balanced("{")
            call = call_of(text, ("arguments", "parameters"), schemas)
            is_last = not (yield from optional(cursor, ","))
            if is_last:
                yield from optional(cursor, "]")
            tell(call)
            if is_last:
                yield from repeated(cursor, *BRACKETS)
                return


@dataclass(frozen=True)
class SeparatedCalls:
    """DeepSeek V3 and V3.1: a section of calls, each a name, a separator and JSON. V3 writes a type before
    the name and a fence around the JSON."""

    openers: tuple[str, ...] = ("<｜tool▁calls▁begin｜>",)
    section_end: str = "<｜tool▁calls▁end｜>"
    begin: str = "<｜tool▁call▁begin｜>"
    separator: str = "<｜tool▁sep｜>"
    end: str = "<｜tool▁call▁end｜>"
    has_fence: bool = False  # which of the two forms a grammar enforces

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        yield from cursor.space()
        yield from cursor.expect(self.begin)
        while True:
            call = yield from self._read_call(cursor, schemas)
            yield from closed(cursor, self.end, *SURPLUS)
            following = yield from optional(cursor, self.begin, self.section_end)
            if following == self.begin:
                cursor.position -= len(self.begin)
            tell(call)
            if following != self.begin:
                return
            cursor.position += len(self.begin)

    def _read_call(self, cursor: Cursor, schemas: Schemas) -> Generator[None, None, ToolCall]:
        name = yield from cursor.until(self.separator, limit=MAX_NAME)
        yield from cursor.expect(self.separator)
        yield from cursor.space()
        is_known = name.strip() in schemas
        if is_known and (yield from follows(cursor, self.end)):
            return arguments_of(name, "{}", schemas)
        start = cursor.position
        if (yield from cursor.option("{", f"null{self.end}")):
            cursor.position = start
        elif not is_known or not (yield from follows(cursor, *FENCES)):
            name = yield from cursor.until("\n", "{", limit=MAX_NAME)
        yield from skip_all(cursor, *FENCES)
        text = yield from object_or_null(cursor)
        yield from optional(cursor, FENCES[-1])
        return arguments_of(name, text, schemas)
