"""Replaces structural tokens that clients spell out by marks, anywhere in a conversation."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headway.server.base.conversation import Conversation
from headway.server.text.control_text import TokenParts, json_form
from headway.server.text.template_frames import MarkedConversation

# The one field of a message without text of the client: its value is in the server's own list.
ROLE = "role"
# Names of the API and of JSON Schema, which templates look up; no parts of tokens are marked in them.
FORM_NAMES = frozenset({
    "type", "function", "name", "description", "parameters", "arguments", "strict", "id", "title", "text", "content",
    "required", "properties", "items", "enum", "const", "default", "format", "anyOf", "oneOf", "allOf",
    "additionalProperties", "nullable", "return", "response", "doc_id",
})  # fmt: skip
TYPES = frozenset({"function", "object", "string", "number", "integer", "boolean", "array", "null"})
# Objects whose names the client chooses.
FREE_OBJECTS = ("properties", "arguments", "$defs", "definitions")


class Escaper:
    """Replaces texts in one conversation. Mutable: collects the texts that it replaces; `marked` is its only
    writer.

    The mark contains nothing that templates change: no letters, no spaces, nothing that JSON escapes.
    """

    def __init__(self, pattern: re.Pattern[str] | None, parts: TokenParts | None = None) -> None:
        self._pattern = pattern
        self._parts = parts
        self._mark = f"~{secrets.randbelow(10**18):018}~"
        self._numbers: dict[str, int] = {}
        self._joins = False

    def marked(self, conversation: Conversation) -> MarkedConversation | None:
        """Returns the conversation with marks in place of structural tokens, and of their parts at the
        ends of texts. None if it has neither."""
        if self._pattern is None:
            return None
        if self._parts is not None:
            self._joins = self._may_join(conversation, self._parts)
        by_tokens = self._conversation(conversation, None)
        by_parts = self._conversation(conversation, self._parts)
        if not self._numbers:
            return None
        # A template that writes JSON escapes some tokens; the escaped texts need a number, too.
        for text in [*self._numbers]:
            self._marked(json_form(text))
        return MarkedConversation(
            by_tokens=by_tokens,
            with_parts=None if by_parts == by_tokens else by_parts,
            mark=self._mark,
            spelled=tuple(self._numbers),
        )

    def _may_join(self, conversation: Conversation, parts: TokenParts) -> bool:
        """Returns whether the middle of a token, such as `think`, may be completed: by other texts, or by
        the template, which puts some words between delimiters."""
        others = [part for name, part in conversation.parts() if name != "messages"]
        if any(True for text in _strings(others)):
            return True
        for message in conversation.messages:
            texts = [text.strip() for text in _strings({**message, ROLE: None})]
            if len(texts) > 1 or any(parts.ending(text) or parts.beginning(text) for text in texts):
                return True
        return False

    def _conversation(self, conversation: Conversation, parts: TokenParts | None) -> Conversation:
        return replace(
            conversation,
            messages=[self._message(message, parts) for message in conversation.messages],
            tools=self._value(conversation.tools, parts),
            documents=self._value(conversation.documents, parts),
            template_variables={
                name: self._value(value, parts) for name, value in conversation.template_variables.items()
            },
        )

    def _message(self, message: dict[str, Any], parts: TokenParts | None) -> dict[str, Any]:
        """Replaces texts in a message. The names of its own fields are no text."""
        return {name: value if name == ROLE else self._value(value, parts) for name, value in message.items()}

    def _value(self, value: Any, parts: TokenParts | None, *, has_free_names: bool = False) -> Any:
        if isinstance(value, str):
            return self._replaced(value, parts)
        if isinstance(value, list):
            return [self._value(entry, parts) for entry in value]
        if not isinstance(value, dict):
            return value
        replaced = {}
        for name, entry in value.items():
            is_form = not has_free_names and name in FORM_NAMES
            new_name = self._replaced(name, None if is_form else parts)
            if is_form and name == "type" and isinstance(entry, str) and entry in TYPES:
                replaced[new_name] = entry
            else:
                is_free = not has_free_names and name in FREE_OBJECTS
                replaced[new_name] = self._value(entry, parts, has_free_names=is_free)
        return replaced

    def _replaced(self, text: str, parts: TokenParts | None) -> str:
        assert self._pattern is not None
        if parts is None:
            return self._pattern.sub(lambda match: self._marked(match[0]), text)
        replaced = []
        at = 0
        for match in self._pattern.finditer(text):
            between = text[at : match.start()]
            replaced += [self._first_part(between, parts) if at == 0 else between, self._marked(match[0])]
            at = match.end()
        if at:
            return "".join([*replaced, self._last_part(text[at:], parts)])
        if self._joins and text.strip() and parts.is_inside(text.strip()):
            return text.replace(text.strip(), self._marked(text.strip()))
        return self._last_part(self._first_part(text, parts), parts)

    def _first_part(self, text: str, parts: TokenParts) -> str:
        """Marks a part at the beginning. Templates may trim a text, so that white space around it stays
        outside of the mark."""
        trimmed = text.lstrip()
        part = parts.ending(trimmed)
        return text[: len(text) - len(trimmed)] + self._marked(part) + trimmed[len(part) :] if part else text

    def _last_part(self, text: str, parts: TokenParts) -> str:
        trimmed = text.rstrip()
        part = parts.beginning(trimmed)
        cut = len(trimmed) - len(part)
        return text[:cut] + self._marked(part) + text[len(trimmed) :] if part else text

    def _marked(self, text: str) -> str:
        number = self._numbers.setdefault(text, len(self._numbers))
        return f"{self._mark}{number}~"


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value, without the names of objects."""
    if isinstance(value, str):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(entry)
