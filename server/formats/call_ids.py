"""Ids of tool calls, in the form that the model's chat template accepts."""

from __future__ import annotations

import hashlib
import string
from dataclasses import replace
from random import Random
from typing import Any

from headway.server.base.conversation import Conversation

_LETTERS = string.ascii_letters + string.digits


def new_call_id(length: int | None, draws: Random) -> str:
    """Returns a new unique id. length: of ids of letters and digits only; None allows any form."""
    if length is None:
        return f"call_{draws.randbytes(12).hex()}"
    return "".join(draws.choice(_LETTERS) for _ in range(length))


def with_call_ids(conversation: Conversation, length: int | None) -> Conversation:
    """Returns the conversation with ids of this many letters and digits; None leaves it as it is.

    Ids of other forms, which clients bring from other servers, are replaced by their hash, so that a call and
    its result keep the same id. Results without an id get those of the preceding calls, in order.
    """
    if length is None:
        return conversation
    waiting: list[str] = []
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(conversation.messages):
        calls = [
            {**call, "id": _short(call.get("id") or f"{i} {j}", length)}
            for j, call in enumerate(message.get("tool_calls") or ())
        ]
        if calls:
            waiting = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            call_id = _short(given or f"{i}", length) if given or not waiting else waiting[0]
            waiting = [other for other in waiting if other != call_id]
            message = {**message, "tool_call_id": call_id}
        messages.append(message)
    return replace(conversation, messages=messages)


def _short(call_id: str, length: int) -> str:
    is_short = len(call_id) == length and set(call_id) <= set(_LETTERS)
    return call_id if is_short else hashlib.sha256(call_id.encode()).hexdigest()[:length]
