"""Translates a body of /v1/responses to a chat. All functions are pure."""

from __future__ import annotations

from headway.server.base.field_names import FieldNames
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.checks import check_count, check_range, require
from headway.server.protocol.responses_api import (
    INCLUDES,
    LOGPROBS,
    MAX_METADATA,
    RANGES,
    ResponsesRequest,
    TextOptions,
)
from headway.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from headway.server.responses_api.input import messages_of
from headway.server.responses_api.tools import ResponseTools, tools_of

NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "response_format": "text.format", "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}  # fmt: skip
# Fields with the same name and meaning in both; the four that are left out differ in form.
SHARED = sorted(
    {*ResponsesRequest.__struct_fields__}.intersection(ChatRequest.__struct_fields__)
    - {"tools", "tool_choice", "stream_options", "reasoning_effort"}
)


def as_chat(body: ResponsesRequest) -> tuple[ChatRequest, FieldNames, ResponseTools]:
    """Returns the chat, the names of its fields in the request, and its tools. Raises ApiError with the
    request's names."""
    _check(body)
    names = FieldNames(NAMES)
    tools = tools_of(body, names)
    chat = ChatRequest(
        messages=messages_of(body, names, tools.ignored),
        tools=tools.tools or None,
        tool_choice=tools.choice,
        response_format=_response_format(body.text),
        reasoning_effort=_effort(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        **{name: getattr(body, name) for name in SHARED},
    )
    return chat, names, tools


def _check(body: ResponsesRequest) -> None:
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(body, name), low, high)
    check_count("metadata", list(body.metadata or ()), MAX_METADATA, "entries")
    for i, value in enumerate(body.include or ()):
        require(value in INCLUDES, f"include[{i}]", repr(value[:200]), f"one of {', '.join(INCLUDES)}")
    if body.speculation is not None:
        wanted = body.speculation.draft_positions
        limit = "false or left out: /v1/chat/completions tells them"
        require(not wanted, "speculation.draft_positions", "true", limit)


def _effort(body: ResponsesRequest) -> str | None:
    effort, other = None if body.reasoning is None else body.reasoning.effort, body.reasoning_effort
    is_one = effort is None or other in (None, effort)
    require(is_one, "reasoning_effort", repr(other), f"reasoning.effort = {effort!r}, or left out")
    return effort if other is None else other


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    wanted = text.format
    held = JsonSchemaFormat(wanted.name, wanted.schema, wanted.strict, wanted.description)
    is_schema = wanted.type == "json_schema" or held != JsonSchemaFormat()
    return ResponseFormat(wanted.type, held if is_schema else None)
