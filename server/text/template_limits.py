"""Finds out by rendering which conversations a chat template accepts, and folds conversations to that form.

All conversations are folded here and nowhere else: clients send histories that nobody can edit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError

Message = dict[str, Any]
Render = Callable[[Conversation], Awaitable[str]]
_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """The conversations that a template accepts; all True if nothing is known of it.

    system: a system message at the beginning. several_systems: more than one there. late_system: one later
    on. repeated_roles: two successive messages of the user, or two answers. several_calls: in one message.
    any_arguments: calls whose arguments are no objects. users_behind_results: a message of the user directly
    after results of calls.
    """

    system: bool = True
    several_systems: bool = True
    late_system: bool = True
    repeated_roles: bool = True
    several_calls: bool = True
    any_arguments: bool = True
    users_behind_results: bool = True


@dataclass(frozen=True, slots=True)
class Folded:
    """origins: for each message, the index of the first message that it consists of. dropped: paths of
    arguments that are left out."""

    conversation: Conversation
    origins: Sequence[int]
    dropped: Sequence[str] = ()


@dataclass(slots=True)
class KnownLimits:
    """The limits of the served template. Mutable: found at first use. by_tools: those for conversations with
    tools, and without."""

    by_tools: dict[bool, TemplateLimits] = field(default_factory=dict)

    async def of(self, render: Render, *, has_tools: bool) -> TemplateLimits:
        if has_tools not in self.by_tools:
            self.by_tools[has_tools] = await probed(render, has_tools=has_tools)
        return self.by_tools[has_tools]

    async def warm_up(self, render: Render) -> None:
        """Finds both limits before the first request needs them. If nothing can be rendered now, that
        request finds them."""
        with suppress(ApiError):
            for has_tools in (False, True):
                await self.of(render, has_tools=has_tools)


async def probed(render: Render, *, has_tools: bool) -> TemplateLimits:
    """Renders small conversations. A template accepts one if it raises nothing and writes all of its
    texts."""

    async def takes(*messages: Message) -> bool:
        conversation = Conversation(list(messages), tools=[_TOOL] if has_tools else None)
        try:
            text = await render(conversation)
        except ApiError as error:
            if error.code != "chat_template_error":
                raise
            return False
        return all(word in text for message in messages for word in _words(message))

    user, more, answer = _said("user", "ask1"), _said("user", "ask2"), _said("assistant", "said1")
    first, second = _said("system", "rule1"), _said("system", "rule2")
    if not await takes(user, answer, more):
        return TemplateLimits()
    has_system = await takes(first, user, answer, more)
    called, results = _calling(_call(1)), [_result(1), _result(2)]
    has_calls = await takes(user, called, results[0])
    return TemplateLimits(
        system=has_system,
        several_systems=has_system and await takes(first, second, user),
        late_system=await takes(first, user, answer, second, more) and await takes(user, second),
        repeated_roles=await takes(user, more)
        and await takes(user, answer, _said("assistant", "said2"), more),
        several_calls=not has_calls
        or await takes(user, _calling(_call(1), _call(2)), *results)
        or not await takes(user, called, results[0], _calling(_call(2)), results[1]),
        any_arguments=not has_calls or await takes(user, _calling(_call(1, "odd1")), results[0]),
        users_behind_results=not has_calls or await takes(user, called, results[0], more),
    )


def _said(role: str, word: str) -> Message:
    return {"role": role, "content": f"probe-{word}"}


def _call(number: int, arguments: str | None = None) -> Message:
    """Returns a call whose id is valid in templates with ids of nine letters and digits."""
    value: Any = {"key": f"probe-value{number}"} if arguments is None else f"probe-{arguments}"
    function = {"name": f"probe-name{number}", "arguments": value}
    return {"id": f"probecal{number}", "type": "function", "function": function}


def _calling(*calls: Message) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _result(number: int) -> Message:
    return {"role": "tool", "content": f"probe-result{number}", "tool_call_id": f"probecal{number}"}


def _words(message: Message) -> list[str]:
    words = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        words += [
            call["function"]["name"],
            *(arguments.values() if isinstance(arguments, dict) else [arguments]),
        ]
    return words


def is_plain(conversation: Conversation) -> bool:
    """Returns whether every template is expected to accept the conversation as it is, so that its limits
    do not matter."""
    roles = [message["role"] for message in conversation.messages]
    calls = [call for message in conversation.messages for call in message.get("tool_calls") or ()]
    return (
        "system" not in roles
        and not any(len(message.get("tool_calls") or ()) > 1 for message in conversation.messages)
        and not any(_is_odd(call) for call in calls)
        and not any(
            role == other != "tool" or (role, other) == ("tool", "user") for role, other in pairwise(roles)
        )
    )


def folded(conversation: Conversation, limits: TemplateLimits) -> Folded:
    """Returns the conversation in a form that the template accepts."""
    entries = [_Entry(i, message) for i, message in enumerate(conversation.messages)]
    dropped: list[str] = []
    if not limits.any_arguments:
        entries = [_with_objects(entry, dropped) for entry in entries]
    if not limits.several_calls:
        entries = _one_by_one(entries)
    entries = _with_systems_folded(entries, limits)
    if not limits.users_behind_results:
        entries = _merged(entries, lambda last, entry: last.role == "tool" and entry.role == "user")
    if not limits.repeated_roles:
        entries = _merged(entries, lambda last, entry: last.role == entry.role != "tool" and not last.calls)
    messages = [entry.joined() for entry in entries]
    return Folded(replace(conversation, messages=messages), [entry.origin for entry in entries], dropped)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A message, and the index of the one that it comes from. texts: those of the messages that were
    merged into it. is_open: the user's next message is merged into it, too."""

    origin: int
    message: Message
    texts: list[str] = field(default_factory=list)
    is_open: bool = field(default=False, kw_only=True)

    @property
    def role(self) -> str:
        return str(self.message["role"])

    @property
    def calls(self) -> list[Message]:
        return self.message.get("tool_calls") or []

    def followed_by(self, other: _Entry, *, is_open: bool = False) -> _Entry:
        """Returns an entry that replaces both, with the fields of both."""
        self.texts.extend((other.message["content"], *other.texts))
        both = {**other.message, **self.message}
        return _Entry(self.origin, both, self.texts, is_open=is_open)

    def joined(self) -> Message:
        """Returns the message with all texts, one a line."""
        if not self.texts:
            return self.message
        texts = [text for text in (self.message["content"], *self.texts) if text]
        return {**self.message, "content": "\n".join(texts)}


def _is_odd(call: Message) -> bool:
    return not isinstance(call["function"]["arguments"], dict)


def _with_objects(entry: _Entry, dropped: list[str]) -> _Entry:
    """Replaces arguments that are no object by an empty one. The call itself and its result stay."""
    calls = []
    for i, call in enumerate(entry.calls):
        if _is_odd(call):
            dropped.append(f"messages[{entry.origin}].tool_calls[{i}].function.arguments")
            call = {**call, "function": {**call["function"], "arguments": {}}}
        calls.append(call)
    return replace(entry, message={**entry.message, "tool_calls": calls}) if calls else entry


def _one_by_one(entries: Sequence[_Entry]) -> list[_Entry]:
    """Splits several calls of one message to call, result, call, result."""
    told = list[_Entry]()
    left = list(entries)
    while left:
        entry = left.pop(0)
        if len(entry.calls) < 2:
            told.append(entry)
            continue
        results = list[_Entry]()
        while left and left[0].role == "tool":
            results.append(left.pop(0))
        ids = {call.get("id") for call in entry.calls}
        for i, call in enumerate(entry.calls):
            kept = entry.message if i == 0 else {"role": entry.role, "content": ""}
            told.append(_Entry(entry.origin, {**kept, "tool_calls": [call]}))
            own = [
                one for one in results if one.message.get("tool_call_id", call.get("id")) == call.get("id")
            ]
            own = own or [one for one in results if one.message.get("tool_call_id") not in ids]
            for one in own[:1]:
                told.append(one)
                results.remove(one)
        told += results
    return told


def _with_systems_folded(entries: Sequence[_Entry], limits: TemplateLimits) -> list[_Entry]:
    """Merges system messages that the template would not show into the preceding turn, or turns them into
    messages of the user."""
    told = list[_Entry]()
    for entry in entries:
        last = told[-1] if told else None
        if entry.role == "system" and not _is_shown(last, limits):
            if last is not None and last.role in ("system", "user", "tool"):
                told[-1] = last.followed_by(entry, is_open=last.is_open)
            else:
                told.append(_Entry(entry.origin, {**entry.message, "role": "user"}, is_open=True))
        elif last is not None and last.is_open and entry.role == "user":
            told[-1] = last.followed_by(entry)
        else:
            told.append(entry)
    return told


def _is_shown(last: _Entry | None, limits: TemplateLimits) -> bool:
    """Returns whether the template shows a system message after the last message."""
    if last is None:
        return limits.system
    return limits.several_systems if last.role == "system" else limits.late_system


def _merged(entries: Sequence[_Entry], belongs: Callable[[_Entry, _Entry], bool]) -> list[_Entry]:
    """Returns the entries, with each that belongs to the one before it as a part of that one."""
    told = list[_Entry]()
    for entry in entries:
        if told and belongs(told[-1], entry):
            told[-1] = told[-1].followed_by(entry)
        else:
            told.append(entry)
    return told
