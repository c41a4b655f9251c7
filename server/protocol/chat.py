"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from headway.engine import MAX_LOGPROBS
from headway.server.errors import ApiError
from headway.server.protocol.checks import check_count, require
from headway.server.protocol.parameters import (
    MAX_INTEGER,
    GenerationFields,
    Ranges,
    check_generation,
    check_ranges,
)
from headway.server.protocol.unserved import CHAT, MESSAGE, PAGE, Table
from headway.server.protocol.usage import DraftPositions, SpeculationReport, Usage

MAX_MESSAGES = 4096


ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function")
TEXT_TYPES = ("text", "input_text", "output_text")
# Parts of an assistant's content in which clients keep what the model thought; they are no part of its answer.
THOUGHT_TYPES = ("thinking", "redacted_thinking", "reasoning")


class ContentPart(msgspec.Struct):
    """Only text is served. Other fields of a text part carry no text and are ignored."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: object = None
    input_audio: object = None
    file: object = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """content: may be left out by an assistant, whose refusal then is the text."""

    unserved: ClassVar[Table] = MESSAGE

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None


class ChatRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    unserved: ClassVar[Table] = CHAT

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: object = None  # there are no tools

    @property
    def token_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens as it was called before."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


RANGES: Ranges = {
    "max_tokens": (1, MAX_INTEGER),
    "max_completion_tokens": (1, MAX_INTEGER),
    "top_logprobs": (0, MAX_LOGPROBS),
}


def check(request: ChatRequest) -> None:
    """Refuses values out of range and fields that are not served, each by name."""
    check_generation(request)
    check_ranges(request, RANGES)
    require(
        request.max_tokens in (None, request.token_limit),
        "max_tokens",
        request.max_tokens,
        f"max_completion_tokens = {request.max_completion_tokens}, or left out",
    )
    if request.top_logprobs and not request.logprobs:
        message = "top_logprobs is only allowed when logprobs is true"
        raise ApiError(message, param="top_logprobs", code="invalid_value")


def check_messages(messages: Sequence[Message]) -> None:
    require(len(messages) > 0, "messages", "empty", "a list of 1 message or more")
    check_count("messages", messages, MAX_MESSAGES, "messages")


def template_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as chat templates expect them: contents as strings, no developers."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, str]:
    _check_role(message.role, f"{where}.role")
    is_assistant = message.role == "assistant"
    if message.content is None and not is_assistant:
        path = f"{where}.content"
        raise ApiError(f"{path} is missing; it is required", param=path, code="missing_required_parameter")
    content = _text(message.content or "", f"{where}.content", is_assistant=is_assistant)
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": content or (is_assistant and message.refusal) or ""}
    return plain if message.name is None else plain | {"name": message.name}


def _check_role(role: str, path: str) -> None:
    served = ", ".join(map(repr, ROLES))
    if role in TOOL_ROLES:
        message = (
            f"{path} is {role!r}, it must be one of {served}: tools are not served; write the tool's result into the "
            f"content of a user's message, or leave the message out. See {PAGE}"
        )
        raise ApiError(message, param=path, code="unsupported_parameter")
    require(role in ROLES, path, repr(role), f"one of {served}")


def _text(content: str | list[ContentPart], where: str, *, is_assistant: bool) -> str:
    """The parts of a list are lines of one text."""
    if isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(content):
        if is_assistant and part.type in THOUGHT_TYPES:
            continue
        text = part.text if part.type in TEXT_TYPES else None
        if is_assistant and part.type == "refusal":
            text = part.refusal
        if text is None or (part.image_url, part.input_audio, part.file) != (None, None, None):
            path = f"{where}[{i}].type"
            message = f"{path} is {part.type!r}; this server reads parts of type 'text' that have a text and nothing else"
            raise ApiError(message, param=path, code="unsupported_content")
        lines.append(text)
    return "\n".join(lines)


class TopLogprob(msgspec.Struct):
    """bytes: of the token; `token` shows what is not whole characters as replacement characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    speculation: DraftPositions | UnsetType = UNSET
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    speculation: SpeculationReport | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    speculation: DraftPositions | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
