"""A body of /v1/responses as the chat that it asks for. Pure: bodies in, bodies out."""

from __future__ import annotations

from headway.server.errors import ApiError
from headway.server.field_names import FieldNames
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.checks import check_count, check_range, missing, require
from headway.server.protocol.responses import (
    INCLUDES,
    LOGPROBS,
    MAX_METADATA,
    RANGES,
    ChoiceOfTools,
    ResponsesRequest,
    TextOptions,
)
from headway.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from headway.server.protocol.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolChoice,
)
from headway.server.protocol.unserved import PAGE
from headway.server.responses_input import messages_of

NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort", "response_format": "text.format", "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}  # fmt: skip
# Fields that have one name and one meaning in both; of these four the form differs.
SHARED = sorted(
    {*ResponsesRequest.__struct_fields__}.intersection(ChatRequest.__struct_fields__)
    - {"tools", "tool_choice", "stream_options", "reasoning_effort"}
)


def as_chat(body: ResponsesRequest) -> tuple[ChatRequest, FieldNames]:
    """Returns the chat, and the names of its fields in the request. Raises ApiError by the request's names."""
    _check(body)
    names = FieldNames(NAMES)
    messages = messages_of(body, names)
    tools, choice = _tools(body, names)
    chat = ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        response_format=_response_format(body.text),
        reasoning_effort=_effort(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        **{name: getattr(body, name) for name in SHARED},
    )
    return chat, names


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


def _tools(body: ResponsesRequest, names: FieldNames) -> tuple[list[Tool] | None, ToolChoice | None]:
    """Returns the functions that may be called, and the choice among them."""
    choice, allowed = body.tool_choice, None
    tools: list[Tool] = []
    if isinstance(choice, ChoiceOfTools) and choice.type == "allowed_tools":
        allowed = _allowed(choice, {tool.name for tool in body.tools or ()})
    check_count("tools", body.tools, MAX_TOOLS, "tools")
    for i, tool in enumerate(body.tools or ()):
        where = f"tools[{i}]"
        if tool.type != "function":
            message = f"{where}.type is {tool.type[:64]!r}, it must be 'function': this server runs no tools itself; leave it out. See {PAGE}"
            raise ApiError(message, param=f"{where}.type", code="unsupported_parameter")
        if tool.name is None:
            raise missing(f"{where}.name")
        if allowed is not None and tool.name not in allowed:
            continue
        for path in (f"tools[{len(tools)}]", f"tools[{len(tools)}].function"):
            names.add(path, where)
        definition = FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict)
        tools.append(Tool("function", definition))
    return tools or None, _choice(choice)


def _allowed(choice: ChoiceOfTools, known: set[str | None]) -> set[str | None]:
    check_count("tool_choice.tools", choice.tools, MAX_TOOLS, "tools")
    for i, tool in enumerate(choice.tools or ()):
        where = f"tool_choice.tools[{i}]"
        require(tool.type == "function", f"{where}.type", repr(tool.type[:64]), "'function'")
        require(tool.name in known, f"{where}.name", repr(tool.name), "the name of one of the tools")
    return {tool.name for tool in choice.tools or ()}


def _choice(choice: str | ChoiceOfTools | None) -> ToolChoice | None:
    if not isinstance(choice, ChoiceOfTools):
        return choice
    if choice.type == "allowed_tools":
        mode = choice.mode or "auto"
        require(mode in ("auto", "required"), "tool_choice.mode", repr(mode[:64]), "'auto' or 'required'")
        return mode
    if choice.type != "function":
        message = (
            f"tool_choice.type is {choice.type[:64]!r}, it must be 'function' or 'allowed_tools'. See {PAGE}"
        )
        raise ApiError(message, param="tool_choice.type", code="unsupported_parameter")
    if choice.name is None:
        raise missing("tool_choice.name")
    return NamedChoice("function", NamedFunction(choice.name))
