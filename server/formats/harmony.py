"""The output of gpt-oss: a sequence of messages, each with a header that names its channel and its
recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headway.server.formats.arguments import lenient_object, object_text, schemas_of
from headway.server.formats.cursor import (
    Markers,
    NoCallError,
    Wait,
    follows,
    object_or_null,
    skip_all,
)
from headway.server.formats.json_calls import FENCES, SURPLUS
from headway.server.formats.parser import CursorParser, TextSink
from headway.server.formats.pieces import Reasoning, ToolCall

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, "<|channel|>", "<|constrain|>", MESSAGE, *ENDS)
FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>([a-z]*)")
_HEADER = re.compile(
    r"\s*(assistant)?(\s*to=[\w.-]+)?(<\|channel\|>\w*(\s+to=[\w.-]+)?)*(\s*<\|constrain\|>\w*|\s+\w+)?\s*"
)
_MAX_HEADER = 512


def _is_header(text: str) -> bool:
    """Returns whether a text is the beginning of a header, as far as it goes."""
    return "assistant".startswith(text) or text.startswith(("assistant", "<|"))


class HarmonyParser(CursorParser):
    """Parses the output of one choice.

    The text of the analysis channel is reasoning. A message to one of the functions is a call if its text is
    a JSON object; every other text is content. Well-formed headers are dropped.
    """

    def __init__(self, prompt: str, tools: Sequence[dict[str, Any]] | None) -> None:
        super().__init__(keeps_leading=True)
        self._known = schemas_of(tools)
        self._reader = self._read(prompt.rpartition(START)[2] if START in prompt else "")
        self.is_in_content = False

    def _read(self, prompt_header: str) -> Wait:
        """prompt_header: the prompt's text after the last start of a message."""
        cursor = self._cursor
        header, opened, _ = prompt_header.partition(MESSAGE)
        if opened:
            yield from self._read_body(header)
        while cursor.rest or not cursor.is_ended:
            begin = cursor.position
            try:
                before = yield from cursor.until(MESSAGE, *ENDS, limit=_MAX_HEADER)
            except NoCallError:
                yield from self._without_message()
                continue
            if (yield from cursor.option(MESSAGE)):
                if not _HEADER.fullmatch(before):
                    self._content.take(cursor, begin, begin + len(before))
                yield from self._read_body(before)
            else:
                yield from cursor.option(*ENDS)
                yield from cursor.option(START)
                self._content.take(cursor, begin, begin + len(before))
                self._forget()
        self._content.end()

    def _without_message(self) -> Wait:
        """Drops a header that was cut off; other text is content."""
        if not self._cursor.is_ended:
            yield from self._read_text(self._content)
        else:
            cursor = self._cursor
            begin, cursor.position = cursor.position, len(cursor.text)
            if not (
                _HEADER.fullmatch(cursor.text, begin) or (self._is_cut and _is_header(cursor.text[begin:]))
            ):
                self._content.take(cursor, begin, cursor.position)
            self._forget()

    def _read_body(self, header: str) -> Wait:
        self._forget()
        recipient = (_RECIPIENT.findall(header) or [""])[-1]
        channel = (_CHANNEL.findall(header) or [""])[-1]
        if recipient.startswith(FUNCTIONS) and self._known:
            yield from self._read_call(recipient.removeprefix(FUNCTIONS))
        elif channel == "analysis" and not recipient:
            sink = TextSink(
                lambda text, start: self._pieces.append(Reasoning(text, start)), keeps_leading=False
            )
            yield from self._read_text(sink)
            sink.end()
        else:
            yield from self._read_text(self._content)

    def _read_call(self, name: str) -> Wait:
        cursor = self._cursor
        try:
            yield from cursor.space()
            if name in self._known:
                yield from skip_all(cursor, *FENCES)
            is_empty = name in self._known and (yield from follows(cursor, *ENDS))
            text = "{}" if is_empty else (yield from object_or_null(cursor))
            arguments = lenient_object(text) if name in self._known else object_text(text)
        except NoCallError:
            if self._is_cut:
                cursor.position = len(cursor.text)
                self._forget()
            else:
                yield from self._read_text(self._content)
            return
        self._content.frame()
        self._pieces.append(ToolCall(name, arguments))
        yield from skip_all(cursor, *SURPLUS)
        if (yield from cursor.option(*ENDS)):
            yield from cursor.option(START)
        self._forget()

    def _read_text(self, sink: TextSink) -> Wait:
        """Emits text from the mark to the end of the message: an end token after which another message, or
        nothing, follows."""
        self.is_in_content = sink is self._content
        yield from self._pass_on(sink)
        self.is_in_content = False

    def _pass_on(self, sink: TextSink) -> Wait:
        cursor, markers = self._cursor, Markers(ENDS)
        sink.take(cursor, cursor.mark, cursor.position)
        while True:
            match = markers.find(cursor.text, cursor.position)
            num_held = 0 if match else markers.num_held(cursor.text, cursor.position)
            if cursor.is_ended and not (self._is_cut and num_held > 1):
                num_held = 0  # otherwise the limit has cut a token
            end = match.start() if match else len(cursor.text) - num_held
            sink.take(cursor, cursor.position, end)
            cursor.position = end
            self._forget()
            if match:
                cursor.position = len(match.group())
                is_next = yield from cursor.option(START)
                if self._is_cut and cursor.is_ended and START.startswith(cursor.rest):
                    cursor.position = len(cursor.text)
                if is_next or not cursor.rest:
                    self._forget()
                    return
                sink.take(cursor, 0, len(match.group()))
            elif cursor.is_ended:
                cursor.position = len(cursor.text)
                self._forget()
                return
            else:
                yield

    def _forget(self) -> None:
        self._cursor.mark = self._cursor.position
        self._cursor.forget()
