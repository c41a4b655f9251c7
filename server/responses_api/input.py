"""Translates the items of a conversation in /v1/responses to messages of a chat.

One turn of an assistant is several items there (reasoning, a text, calls) and one message in a chat.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.protocol.chat import MAX_MESSAGES, ContentPart, Message
from headway.server.protocol.checks import check_count, missing, require
from headway.server.protocol.responses_api import InputItem, ResponsesRequest, ResponseTool
from headway.server.protocol.tools import FunctionCall, ToolCall
from headway.server.protocol.unserved import PAGE
from headway.server.responses_api.carried_reasoning import carried_text
from headway.server.responses_api.tools import custom_arguments, function_name

ROLES = ("user", "system", "developer", "assistant")
SYSTEM = ("system", "developer")
KINDS = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning",
)  # fmt: skip
# Calls of another server's own tools in an earlier turn; the assistant's text has their results.
LEFT_OUT = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "mcp_list_tools", "mcp_call",
            "mcp_approval_request", "mcp_approval_response")  # fmt: skip
REASONING_TYPES = ("reasoning_text", "summary_text", "text")

Content = str | list[ContentPart]


def messages_of(body: ResponsesRequest, names: FieldNames, ignored: list[str]) -> list[Message]:
    """Returns the conversation. Raises ApiError for items that are not served, with the request's own paths.

    names: receives the paths of all messages. ignored: receives the paths of items that are left out.
    """
    messages = InputMessages(names, ignored)
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
    """Mutable: takes the items in order.

    Instructions and the messages of system and developer directly after them are joined to one message,
    because many templates allow only one at the beginning.
    """

    def __init__(self, names: FieldNames, ignored: list[str]) -> None:
        self.messages: list[Message] = []
        self._names, self._ignored = names, ignored

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
        elif kind in ("function_call", "custom_tool_call", "local_shell_call"):
            self._add_call(_call(item, kind, where), item.call_id, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._add_result(item.output, item.call_id, where)
        elif kind == "agent_message":
            self.add_text("user", _between_agents(item.content), where, f"{where}.content")
        elif kind in ("tool_search_call", "tool_search_output") and item.execution == "client":
            self._add_search(item, kind, where)
        elif kind in LEFT_OUT or kind.startswith("tool_search_"):
            self._ignored.append(where)
        elif kind != "additional_tools":  # additional_tools is read with the other tools
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
        """Returns whether a text continues the assistant's turn: the turn has none yet, or has called
        tools after it."""
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

    def _add_search(self, item: InputItem, kind: str, where: str) -> None:
        if kind == "tool_search_call":
            self._add_call(FunctionCall("tool_search", item.arguments), item.call_id, where)
        else:
            self._add_result(_found(item.tools or ()), item.call_id, where)

    def _add_call(self, call: FunctionCall, call_id: str | None, where: str) -> None:
        is_open = bool(self.messages) and self._last.role == "assistant"
        message = self._last if is_open else self._open("assistant", where)
        if message.tool_calls is None:
            message.tool_calls = []
            self._names.add(f"{self._path}.tool_calls", where)
        path = f"{self._path}.tool_calls[{len(message.tool_calls)}]"
        self._names.add(path, where)
        self._names.add(f"{path}.function", where)
        message.tool_calls.append(ToolCall(call, call_id, "function"))

    def _add_result(self, output: Content | None, call_id: str | None, where: str) -> None:
        if output is None:
            raise missing(f"{where}.output")
        self._open("tool", where).tool_call_id = call_id
        self._write(output, f"{where}.output")

    def _open(self, role: str, where: str) -> Message:
        self.messages.append(Message(role))
        self._names.add(self._path, where)
        return self._last

    def _write(self, content: Content, where: str) -> None:
        """Sets the last message's content, or appends further parts to it."""
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


def _call(item: InputItem, kind: str, where: str) -> FunctionCall:
    if kind == "local_shell_call":
        return FunctionCall("local_shell", item.action)
    if item.name is None:
        raise missing(f"{where}.name")
    name = function_name(item.name, item.namespace)
    if kind == "custom_tool_call":
        return FunctionCall(name, custom_arguments(item.input or ""))
    return FunctionCall(name, item.arguments)


def _between_agents(content: Content | None) -> Content:
    """Returns the text of a message from one agent to another, which was the argument of a call."""
    if content is None or isinstance(content, str):
        return content or ""
    return [
        part if part.encrypted_content is None else ContentPart("text", part.encrypted_content)
        for part in content
    ]


def _found(tools: Sequence[ResponseTool]) -> str:
    """Returns the result of a search for tools as the model sees it. The tools themselves are among those
    that it may call."""
    names = [
        function_name(one.name or one.type or "", None if one is tool else tool.name)
        for tool in tools
        for one in (tool.tools or (tool,))
    ]
    return f"These tools can be called now: {', '.join(names)}" if names else "No tools were found."


def _parts(content: Content) -> list[ContentPart]:
    return [ContentPart("text", content)] if isinstance(content, str) else content


def _thought(item: InputItem, where: str) -> tuple[str, str]:
    """Returns the field with the text of a reasoning item, and the text."""
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
