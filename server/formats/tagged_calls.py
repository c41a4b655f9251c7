"""Calls whose arguments are texts between tags. Each instance of a class describes one family.

A form reads the calls that begin at one of its openers, with the cursor after the opener, and emits each call
when it is complete.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from headway.server.formats.arguments import (
    MAX_NAME,
    Schemas,
    Tell,
    literal_or_text,
    object_of,
    parameter_schema,
    plain_name,
    quoted,
    value_of,
)
from headway.server.formats.cursor import (
    Cursor,
    NoCallError,
    Wait,
    closed,
    follows,
    optional,
    repeated,
    skip_all,
)
from headway.server.formats.pieces import ToolCall


@dataclass(frozen=True)
class TaggedCalls:
    """`<function=name><parameter=key>value</parameter></function>` in `<tool_call>`: Qwen3-Coder, Qwen3.5 and
    MiMo.

    has_lines: a grammar writes each value on lines of its own. In a text, one line break on each side of a
    value does not belong to it.
    """

    openers: tuple[str, ...] = ("<tool_call>", "<function=")
    closer: str = "</tool_call>"
    call: str = "<function="
    call_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    has_lines: bool = True

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        if opener != self.call:
            yield from skip_all(cursor, opener)
            yield from cursor.expect(self.call)
        name = plain_name((yield from cursor.until(">", "\n", limit=MAX_NAME)))
        yield from cursor.expect(">")
        if opener == self.call and name not in schemas:
            raise NoCallError
        schema = schemas.get(name, {})
        arguments: dict[str, str] = {}
        while True:
            yield from cursor.space()
            if (yield from cursor.expect(self.parameter, self.call_end, self.closer)) != self.parameter:
                break
            key = yield from cursor.until(">", "\n", limit=MAX_NAME)
            yield from cursor.expect(">")
            text = yield from self._read_value(cursor)
            arguments[key] = value_of(text, parameter_schema(schema, key), schema)
        yield from closed(cursor, self.closer, self.call_end)
        tell(ToolCall(name, object_of(arguments)))
        yield from repeated(cursor, self.closer)

    def _read_value(self, cursor: Cursor) -> Generator[None, None, str]:
        """Reads a value, which ends at a tag that another tag follows. If its own closing tag is missing,
        it ends at a line that begins with another tag."""
        start = cursor.position
        while True:
            end = cursor.position + len(
                (yield from cursor.until("</parameter>", "<parameter=", "</function>"))
            )
            begins_line = cursor.text[start:end].endswith("\n")
            tag = yield from cursor.expect(self.parameter_end, self.parameter, self.call_end)
            if tag == self.parameter:
                if begins_line:
                    cursor.position = end
                    break
            elif tag == self.parameter_end:
                if (yield from follows(cursor, self.parameter, self.call_end, self.closer)):
                    break
            elif begins_line and (yield from follows(cursor, self.closer)):
                cursor.position = end
                break
        text = cursor.text[start:end]
        return text.removeprefix("\n").removesuffix("\n")


@dataclass(frozen=True)
class KeyedCalls:
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM.

    has_lines: a grammar writes line breaks between them, as GLM-4.5 and 4.6 do. A value is used as it is.
    """

    openers: tuple[str, ...] = ("<tool_call>",)
    closer: str = "</tool_call>"
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    has_lines: bool = False

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        yield from skip_all(cursor, opener)
        name = plain_name((yield from cursor.until(self.key[0], self.closer, "\n", limit=MAX_NAME)))
        schema = schemas.get(name, {})
        arguments: dict[str, str] = {}
        while True:
            yield from cursor.space()
            if (yield from cursor.expect(self.key[0], self.closer)) == self.closer:
                break
            key = yield from cursor.until(self.key[1], limit=MAX_NAME)
            yield from cursor.expect(self.key[1])
            yield from cursor.space()
            yield from cursor.expect(self.value[0])
            text = yield from self._read_value(cursor)
            arguments[key] = value_of(text, parameter_schema(schema, key), schema)
        tell(ToolCall(name, object_of(arguments)))
        yield from repeated(cursor, self.closer)

    def _read_value(self, cursor: Cursor) -> Generator[None, None, str]:
        """Reads a value, which ends at its closing tag if another tag follows. The answer's last value may
        lack it."""
        start = cursor.position
        try:
            while True:
                yield from cursor.until(self.value[1])
                end = cursor.position
                yield from cursor.expect(self.value[1])
                if (yield from follows(cursor, self.key[0], self.closer)):
                    return cursor.text[start:end]
        except NoCallError:
            end = cursor.text.rfind(self.closer, start)
            if end < 0 or cursor.text[end + len(self.closer) :].strip():
                raise
            cursor.position = end
            return cursor.text[start:end]


@dataclass(frozen=True)
class InvokeCalls:
    """DeepSeek V3.2 and later: a section of `<｜DSML｜invoke name="...">`, whose parameters say whether they
    are strings.

    section: its name. prefix: the text before each name of a tag.
    """

    section: str
    prefix: str = "｜DSML｜"

    @property
    def openers(self) -> tuple[str, ...]:
        return (f"<{self.prefix}{self.section}>",)

    @property
    def section_end(self) -> str:
        return f"</{self.prefix}{self.section}>"

    @property
    def call(self) -> str:
        return f'<{self.prefix}invoke name="'

    @property
    def call_end(self) -> str:
        return f"</{self.prefix}invoke>"

    @property
    def parameter(self) -> str:
        return f'<{self.prefix}parameter name="'

    @property
    def parameter_end(self) -> str:
        return f"</{self.prefix}parameter>"

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        yield from cursor.space()
        yield from cursor.expect(self.call)
        while True:
            call = yield from self._read_call(cursor, schemas)
            following = yield from optional(cursor, self.call, self.section_end)
            if following == self.call:
                cursor.position -= len(self.call)
            tell(call)
            if following != self.call:
                return
            cursor.position += len(self.call)

    def _read_call(self, cursor: Cursor, schemas: Schemas) -> Generator[None, None, ToolCall]:
        name = plain_name((yield from cursor.until('"', limit=MAX_NAME)))
        arguments: dict[str, str] = {}
        if (yield from cursor.expect('"/>', '" />', '">')) != '">':
            return ToolCall(name, "{}")
        schema = schemas.get(name, {})
        while True:
            yield from cursor.space()
            if (yield from cursor.expect(self.parameter, self.call_end)) == self.call_end:
                return ToolCall(name, object_of(arguments))
            key = yield from cursor.until('"', limit=MAX_NAME)
            kind = yield from cursor.expect('" string="true">', '" string="false">', '">')
            text = yield from self._read_value(cursor)
            if "true" in kind:
                arguments[key] = quoted(text)
            elif "false" in kind:
                arguments[key] = literal_or_text(text)
            else:
                arguments[key] = value_of(text, parameter_schema(schema, key), schema)

    def _read_value(self, cursor: Cursor) -> Generator[None, None, str]:
        start = cursor.position
        while True:
            yield from cursor.until(self.parameter_end)
            end = cursor.position
            yield from cursor.expect(self.parameter_end)
            if (yield from follows(cursor, self.parameter, self.call_end)):
                return cursor.text[start:end]
