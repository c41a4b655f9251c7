"""The items of a conversation as /v1/responses takes them, as messages of a chat.

What an assistant did in one turn is several items there (reasoning, a text, calls) and one message in a chat.
"""

from __future__ import annotations

from headway.server.carried_reasoning import carried_text
from headway.server.errors import ApiError
from headway.server.field_names import FieldNames
from headway.server.protocol.chat import MAX_MESSAGES, ContentPart, Message
from headway.server.protocol.checks import check_count, missing, require
from headway.server.protocol.responses import InputItem, ResponsesRequest
from headway.server.protocol.tools import FunctionCall, ToolCall
from headway.server.protocol.unserved import PAGE

ROLES = ("user", "system", "developer", "assistant")
SYSTEM = ("system", "developer")
KINDS = ("message", "function_call", "function_call_output", "reasoning")
REASONING_TYPES = ("reasoning_text", "summary_text", "text")

Content = str | list[ContentPart]


def messages_of(body: ResponsesRequest, names: FieldNames) -> list[Message]:
    """Returns the conversation. Raises ApiError for items that are not served, by the request's own paths.

    names: gets those of all messages.
    """
    messages = InputMessages(names)
    if body.instructions:
        messages.add_text("system", body.instructions, "instructions", "instructions")
    if isinstance(body.input, str):
        messages.add_text("user", body.input, "input", "input")
        return messages.messages
    require(body.input != [], "input", "empty", "a string, or a list of 1 item or more")
    check_count("input", body.input, MAX_MESSAGES, "items")
    for i, item in enumerate(body.input):
        messages.add(item, f"input[{i}]")
    return messages.finished()


class InputMessages:
    """Mutable: takes the items in their order.

    Instructions and the messages of system and developer that follow them at once are one message, because many templates
    allow one at the beginning alone.
    """

    def __init__(self, names: FieldNames) -> None:
        self.messages: list[Message] = []
        self._names = names

    def finished(self) -> list[Message]:
        for message in self.messages:
            if isinstance(message.reasoning_content, list):
                message.reasoning_content = "\n".join(message.reasoning_content)
        return self.messages

    def add(self, item: InputItem, where: str) -> None:
        """where: the item's path."""
        kind = item.type or "message"
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_result(item, where)
        else:
            raise _unserved_kind(kind, f"{where}.type")

    def add_text(self, role: str, content: Content, where: str, content_where: str) -> None:
        """content_where: the path of the content alone."""
        continues = self._last_of(role) if role == "assistant" else role in SYSTEM and self._is_beginning
        if not continues:
            self._open(role, where)
        self._write(content, content_where)

    @property
    def _last(self) -> Message:
        return self.messages[-1]

    @property
    def _path(self) -> str:
        return f"messages[{len(self.messages) - 1}]"

    @property
    def _is_beginning(self) -> bool:
        return len(self.messages) == 1 and self._last.role in SYSTEM

    def _last_of(self, role: str) -> bool:
        """Returns whether a text goes on with the assistant's turn: it has none yet, or has called tools after it."""
        if not self.messages or self._last.role != role:
            return False
        return self._last.content is None or bool(self._last.tool_calls)

    def _add_message(self, item: InputItem, where: str) -> None:
        if item.role is None:
            raise missing(f"{where}.role")
        wanted = f"one of {', '.join(map(repr, ROLES))}"
        require(item.role in ROLES, f"{where}.role", repr(item.role[:64]), wanted)
        if item.content is None:
            raise missing(f"{where}.content")
        self.add_text(item.role, item.content, where, f"{where}.content")

    def _add_reasoning(self, item: InputItem, where: str) -> None:
        field, text = _thought(item, where)
        if not text:
            return
        thoughts = self._last.reasoning_content if self.messages else None
        if isinstance(thoughts, list) and self._last.content is None and not self._last.tool_calls:
            thoughts.append(text)
            return
        self._open("assistant", where).reasoning_content = [text]
        self._names.add(f"{self._path}.reasoning_content", f"{where}.{field}")

    def _add_call(self, item: InputItem, where: str) -> None:
        if item.name is None:
            raise missing(f"{where}.name")
        call = FunctionCall(item.name, item.arguments)
        is_open = bool(self.messages) and self._last.role == "assistant"
        message = self._last if is_open else self._open("assistant", where)
        if message.tool_calls is None:
            message.tool_calls = []
            self._names.add(f"{self._path}.tool_calls", where)
        path = f"{self._path}.tool_calls[{len(message.tool_calls)}]"
        self._names.add(path, where)
        self._names.add(f"{path}.function", where)
        message.tool_calls.append(ToolCall(call, item.call_id, "function"))

    def _add_result(self, item: InputItem, where: str) -> None:
        if item.output is None:
            raise missing(f"{where}.output")
        self._open("tool", where).tool_call_id = item.call_id
        self._write(item.output, f"{where}.output")

    def _open(self, role: str, where: str) -> Message:
        self.messages.append(Message(role))
        self._names.add(self._path, where)
        return self._last

    def _write(self, content: Content, where: str) -> None:
        """Sets the last message's content, or goes on with it by further parts, within its own list."""
        path = f"{self._path}.content"
        if self._last.content is None:
            self._names.add(path, where)
            self._last.content = content
            return
        if isinstance(self._last.content, str):
            self._names.add(f"{path}[0]", self._names.own(path))
        parts = self._last.content = _parts(self._last.content)
        if isinstance(content, str):
            self._names.add(f"{path}[{len(parts)}]", where)
        else:
            self._names.add_entries(path, len(parts), where)
        parts += _parts(content)


def _parts(content: Content) -> list[ContentPart]:
    return [ContentPart("text", content)] if isinstance(content, str) else content


def _thought(item: InputItem, where: str) -> tuple[str, str]:
    """Returns the field that has the text of an item of reasoning, and the text."""
    if item.content not in (None, "", []):
        return "content", _reasoning(item.content, f"{where}.content")
    if item.encrypted_content is not None:
        text = carried_text(item.encrypted_content, f"{where}.encrypted_content")
        if text is not None:
            return "encrypted_content", text
    return "summary", _reasoning(item.summary, f"{where}.summary")


def _reasoning(content: Content | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in REASONING_TYPES or part.text is None:
            path = f"{where}[{i}].type"
            message = f"{path} is {part.type!r}; reasoning is read from parts of type 'reasoning_text' and 'summary_text' that have a text"
            raise ApiError(message, param=path, code="unsupported_content")
    return "\n".join(part.text for part in content if part.text)


def _unserved_kind(kind: str, path: str) -> ApiError:
    remedy = f"send items of type {', '.join(map(repr, KINDS))}"
    if kind == "item_reference":
        remedy = "no item is kept here: send the item itself, as clients do that are told store: false"
    message = f"{path} is {kind[:64]!r}, which is not served; {remedy}. See {PAGE}"
    return ApiError(message, param=path, code="unsupported_parameter")
