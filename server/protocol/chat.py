"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    check_unserved,
)
from headway.server.protocol.usage import DraftPositions, SpeculationReport, Usage

MAX_MESSAGES = 4096


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """Only text is served; the other fields are known so that their type is refused, not their name."""

    type: str
    text: str | None = None
    image_url: object = None
    input_audio: object = None
    file: object = None
    refusal: object = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: str | None = None
    audio: object = None
    tool_calls: object = None
    function_call: object = None


class ChatRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Refused by name, unless the value changes nothing.
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    functions: object = None
    function_call: object = None
    modalities: list[str] | None = None
    audio: object = None
    prediction: object = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: object = None

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
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
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
    check_unserved(request, NEUTRAL_VALUES)


def check_messages(messages: Sequence[Message]) -> None:
    require(len(messages) > 0, "messages", "empty", "a list of 1 message or more")
    check_count("messages", messages, MAX_MESSAGES, "messages")


def template_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages as chat templates expect them: contents as strings, no developers."""
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, str]:
    for name in ("tool_calls", "function_call", "audio"):
        if getattr(message, name):
            path = f"{where}.{name}"
            raise ApiError(
                f"{path} is not supported by this server", param=path, code="unsupported_parameter"
            )
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": _text(message.content, f"{where}.content")}
    return plain if message.name is None else plain | {"name": message.name}


def _text(content: str | list[ContentPart], where: str) -> str:
    """The parts of a list are lines of one text."""
    if isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(content):
        others = (part.image_url, part.input_audio, part.file, part.refusal)
        if part.type != "text" or part.text is None or others != (None,) * len(others):
            path = f"{where}[{i}].type"
            message = f"{path} is {part.type!r}; this server reads parts of type 'text' that have a text and nothing else"
            raise ApiError(message, param=path, code="unsupported_content")
        lines.append(part.text)
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
