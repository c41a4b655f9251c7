"""The turns of a conversation in Anthropic's Messages API, one for each message of a chat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from headway.server.base.errors import ApiError
from headway.server.protocol.chat import ContentPart, Message, check_messages
from headway.server.protocol.checks import missing, require
from headway.server.protocol.media import MEDIA, last_question, media_line
from headway.server.protocol.messages_api import ROLES, Content, MessagesBlock, MessagesTurn, PromptFields
from headway.server.protocol.tools import FunctionCall, ToolCall

# Claude Code writes this header before its system prompt, for billing only. It differs in each request, so
# that the prefix cache would never match anything after it.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
# The role whose messages may have blocks of a type.
_PLACES = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. path: the path of its block."""

    path: str
    call: ToolCall


@dataclass(slots=True)
class Turn:
    """A turn. Mutable: grows while neighbours of one role are joined. where: the path of its beginning.

    role: system, user, assistant or tool. result_of: the id of the call whose result it is. hidden: paths of
    blocks that a line replaces.
    """

    role: str
    where: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    result_of: str | None = None
    hidden: list[str] = field(default_factory=list)

    def message(self) -> Message:
        content = [ContentPart("text", text=text) for text in self.texts]
        return Message(
            role=self.role,
            content=content or (None if self.role == "assistant" else ""),
            tool_calls=[call.call for call in self.calls] or None,
            tool_call_id=self.result_of,
            reasoning_content="\n".join(self.thoughts) or None,
        )

    def names(self) -> Iterator[tuple[str, str]]:
        """Yields (path in the chat's message, path in the body) for the fields that errors may name."""
        content = self.where if self.where == "system" else f"{self.where}.content"
        yield "", self.where
        yield from (
            (f".{name}", content)
            for name in ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
        )
        yield ".tool_call_id", f"{self.where}.tool_use_id"
        for i, call in enumerate(self.calls):
            yield f".tool_calls[{i}]", call.path
            yield f".tool_calls[{i}].function", call.path
            yield f".tool_calls[{i}].function.arguments", f"{call.path}.input"


def turns_of(body: PromptFields) -> list[Turn]:
    """Returns the turns, the system's first. Neighbours of one role are one turn, as the API says; each
    result of a call is a turn by itself."""
    check_messages(body.messages)
    turns: list[Turn] = []
    for turn in _turns(body):
        last = turns[-1] if turns else None
        if last is not None and turn.role == last.role and turn.result_of == last.result_of:
            last.texts += turn.texts
            last.thoughts += turn.thoughts
            last.calls += turn.calls
            last.hidden += turn.hidden
        else:
            turns.append(turn)
    return turns


def _turns(body: PromptFields) -> Iterator[Turn]:
    if body.system is not None:
        texts = [_BILLING.sub("", text) for text in _texts(body.system, "system")]
        if any(texts):
            yield Turn("system", "system", [text for text in texts if text])
    last = last_question(["user" if _asks(message) else "" for message in body.messages])
    for i, message in enumerate(body.messages):
        yield from _turns_of_message(message, f"messages[{i}]", is_question=i == last)


def _asks(message: MessagesTurn) -> bool:
    """Returns whether the message has anything of the user besides results of calls."""
    return message.role == "user" and any(
        isinstance(block, str) or block.type != "tool_result" for block in message.content
    )


def _turns_of_message(message: MessagesTurn, where: str, *, is_question: bool) -> Iterator[Turn]:
    role, content = message.role, message.content
    require(role in ROLES, f"{where}.role", repr(role), f"one of {', '.join(map(repr, ROLES))}")
    if role == "system" or isinstance(content, str):
        yield Turn(role, where, _texts(content, f"{where}.content"))
        return
    turn = Turn(role, where)
    for i, block in enumerate(content):
        path = f"{where}.content[{i}]"
        place = _PLACES.get(block.type, role)
        limit = f"in a message of the {place}"
        require(role == place, f"{path}.type", repr(block.type), limit)
        if block.type == "tool_result":
            if turn.texts:
                yield turn
                turn = Turn(role, where)
            yield _result(block, path)
        elif block.type in MEDIA:
            turn.texts.append(media_line(block.type, f"{path}.type", must_show=is_question))
            turn.hidden.append(path)
        else:
            _add(turn, block, path)
    if turn.texts or turn.thoughts or turn.calls or not content:
        yield turn


def _add(turn: Turn, block: MessagesBlock, path: str) -> None:
    if block.type == "thinking":
        turn.thoughts += [block.thinking] if block.thinking else []
    elif block.type == "tool_use":
        name, call_id = _required(block, "name", path), _required(block, "id", path)
        turn.calls.append(Call(path, ToolCall(FunctionCall(name, block.input or {}), call_id, "function")))
    elif (
        block.type != "redacted_thinking"
    ):  # encrypted thinking of another model, which this server cannot read
        turn.texts.append(_text(block, path))


def _result(block: MessagesBlock, path: str) -> Turn:
    """Returns the turn of a tool's result. Chat templates have no field for a failed call, so that the
    text says it."""
    texts = [] if block.content is None else _texts(block.content, f"{path}.content", shows_lines=True)
    blocks = block.content if isinstance(block.content, list) else []
    hidden = [f"{path}.content[{i}]" for i, one in enumerate(blocks) if one.type in MEDIA]
    if block.is_error:
        texts = ["Error: " + "\n".join(texts)]
    return Turn("tool", path, texts, result_of=_required(block, "tool_use_id", path), hidden=hidden)


def _texts(content: Content, path: str, *, shows_lines: bool = False) -> list[str]:
    """shows_lines: a line replaces a block that is no text."""
    if isinstance(content, str):
        return [content]
    return [
        media_line(block.type, path, must_show=False)
        if shows_lines and block.type in MEDIA
        else _text(block, f"{path}[{i}]")
        for i, block in enumerate(content)
    ]


def _text(block: MessagesBlock, path: str) -> str:
    if block.type == "text":
        return _required(block, "text", path)
    if block.type == "tool_reference":  # every tool is in the prompt, so that its name is sufficient
        return _required(block, "tool_name", path)
    message = f"{path}.type is {block.type!r}; this server reads text: blocks of type 'text', and tools and their results"
    raise ApiError(message, param=f"{path}.type", code="unsupported_content")


def _required(block: MessagesBlock, name: str, path: str) -> str:
    value = getattr(block, name)
    if value is None:
        raise missing(f"{path}.{name}")
    assert isinstance(value, str)
    return value
