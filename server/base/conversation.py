"""A conversation as a chat template sees it: nested JSON values, most of whose strings clients wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a chat template. Messages have their roles and contents as strings; the arguments of tool
    calls are objects where they are valid JSON.

    template_variables: further variables of the template, such as enable_thinking. adds_generation_prompt:
    the prompt ends with the beginning of an answer. continues_final_message: the prompt ends within the last
    message.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    adds_generation_prompt: bool = True
    continues_final_message: bool = False

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yields (field of the request that holds it, value)."""
        yield "messages", self.messages
        yield "tools", self.tools
        yield "documents", self.documents
        yield VARIABLES, self.template_variables

    def with_strings(self, change: Callable[[str], str]) -> Conversation:
        """Returns the conversation with every string and every name of an object changed."""
        return replace(
            self,
            messages=_changed(self.messages, change),
            tools=_changed(self.tools, change),
            documents=_changed(self.documents, change),
            template_variables=_changed(self.template_variables, change),
        )

    def with_entry(self, part: str, key: int | str, other: Conversation) -> Conversation:
        """Returns the conversation with one message, tool, document or variable from another conversation
        of the same shape."""
        if part == VARIABLES:
            variables = {
                name: other.template_variables[name] for name in self.template_variables if name == key
            }
            return replace(self, template_variables=self.template_variables | variables)
        changed: dict[str, Any] = {part: [*getattr(self, part)]}
        changed[part][key] = getattr(other, part)[key]
        return replace(self, **changed)

    def entries(self) -> Iterator[tuple[str, int | str, Any]]:
        """Yields (field, index or name, value) of each message, tool, document and variable."""
        for name, part in self.parts():
            for key, entry in part.items() if isinstance(part, dict) else enumerate(part or ()):
                yield name, key, entry


def is_nested_beyond(value: Any, limit: int) -> bool:
    """Returns whether a JSON value has more levels of objects and arrays than the limit."""
    level = [value]
    for _ in range(limit + 1):
        level = [entry for value in level for entry in _entries(value)]
        if not level:
            return False
    return True


def difference(value: Any, other: Any, path: str) -> tuple[str, str] | None:
    """Returns (path, string of `other`) of the first string or name that differs between two JSON values
    of the same shape; None if there is none."""
    if isinstance(value, str):
        return None if value == other else (path, other)
    if isinstance(value, dict):
        for (name, entry), (other_name, other_entry) in zip(value.items(), other.items(), strict=True):
            if name != other_name:
                return path, other_name
            if (found := difference(entry, other_entry, f"{path}.{name}")) is not None:
                return found
    if isinstance(value, list):
        for i, (entry, other_entry) in enumerate(zip(value, other, strict=True)):
            if (found := difference(entry, other_entry, f"{path}[{i}]")) is not None:
                return found
    return None


def _entries(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _changed(entry, change) for name, entry in value.items()}
    return [_changed(entry, change) for entry in value] if isinstance(value, list) else value
