"""Tools that a model may call: their definitions, the choice among them, and calls in earlier turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from headway.server.base.errors import ApiError
from headway.server.protocol.checks import check_count, missing, require
from headway.server.protocol.unserved import FUNCTION, PAGE, TOOL, Table

MAX_TOOLS = 512
MAX_TOOL_CALLS = 128  # of one message
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")
Reference = TypeVar("Reference")


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True):
    """parameters: a JSON Schema of the arguments; None for a function without arguments. strict: the
    schema is enforced while arguments are generated."""

    unserved: ClassVar[Table] = FUNCTION

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. Only functions are served."""

    unserved: ClassVar[Table] = TOOL

    type: str
    function: FunctionDefinition | None = None
    custom: object = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    passes_unknown: ClassVar[bool] = True

    name: str


class ToolReference(msgspec.Struct, forbid_unknown_fields=True):
    """A tool by the name of its function, which is within `function` or beside the type."""

    passes_unknown: ClassVar[bool] = True

    type: str
    function: NamedFunction | None = None
    name: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    passes_unknown: ClassVar[bool] = True

    mode: str | None = None
    tools: list[ToolReference] | None = None


class NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The choice of one function by name, or of some tools (type allowed_tools) by a mode, auto or
    required. The tools and the mode are within `allowed_tools` or beside the type."""

    type: str
    function: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None
    custom: object = None


ToolChoice = str | NamedChoice


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """arguments: JSON as text, or the value itself."""

    passes_unknown: ClassVar[bool] = True

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of an earlier answer. Further fields that clients store with it are ignored."""

    passes_unknown: ClassVar[bool] = True

    function: FunctionCall | None = None
    id: str | None = None
    type: str | None = None


def allowed_tools(
    mode: str | None,
    tools: Sequence[Reference] | None,
    where: str,
    named: Callable[[Reference, str], Collection[str]],
) -> tuple[str, set[str]]:
    """Returns the mode of a choice of some tools, and the names of their functions.

    where: the path of the choice. named: returns the functions of a reference, given the reference and its
    path.
    """
    mode = mode or "auto"
    require(mode in ("auto", "required"), f"{where}.mode", repr(mode[:64]), "'auto' or 'required'")
    if tools is None:
        raise missing(f"{where}.tools")
    check_count(f"{where}.tools", tools, MAX_TOOLS, "tools")
    return mode, {name for i, tool in enumerate(tools) for name in named(tool, f"{where}.tools[{i}]")}


def check_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> None:
    """Refuses definitions that are no functions, and a choice of tools that are not defined, each by its
    path."""
    check_count("tools", tools, MAX_TOOLS, "tools")
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        function = _function_of(tool, where)
        path = f"{where}.function.name"
        require(
            _NAME.fullmatch(function.name) is not None,
            path,
            repr(function.name[:200]),
            "1 to 128 letters of a-z and A-Z, digits, underscores, hyphens and dots",
        )
        other = seen.setdefault(function.name, i)
        require(other == i, path, repr(function.name), f"another name than that of tools[{other}]")
    _check_choice(choice, tuple(seen))


def _function_of(tool: Tool, where: str) -> FunctionDefinition:
    if tool.type != "function":
        message = f"{where}.type is {tool.type!r}, it must be 'function': other kinds of tools are not served. See {PAGE}"
        raise ApiError(message, param=f"{where}.type", code="unsupported_parameter")
    if tool.function is None:
        raise missing(f"{where}.function")
    return tool.function


def _check_choice(choice: ToolChoice | None, names: Sequence[str]) -> None:
    if choice is None:
        return
    if isinstance(choice, str):
        wanted = ", ".join(map(repr, CHOICES))
        require(
            choice in CHOICES,
            "tool_choice",
            repr(choice),
            f"one of {wanted}, or an object that names a function",
        )
        require(
            choice != "required" or bool(names),
            "tool_choice",
            repr(choice),
            "'none' or 'auto' where there are no tools",
        )
        return
    if choice.type != "function":
        message = (
            f"tool_choice.type is {choice.type[:64]!r}, it must be 'function' or 'allowed_tools': other kinds of tools are not "
            f"served. See {PAGE}"
        )
        raise ApiError(message, param="tool_choice.type", code="unsupported_parameter")
    if choice.function is None:
        raise missing("tool_choice.function")
    told = ", ".join(names) if names else "none is given"
    name = choice.function.name
    require(
        name in names,
        "tool_choice.function.name",
        repr(name[:200]),
        f"the name of one of the tools ({told[:500]})",
    )


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Returns the tools as chat templates expect them: in OpenAI's form without fields for the server.
    None without tools."""
    return [_tool(tool, with_strict=False) for tool in tools or ()] or None


def grammar_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Returns the tools as output formats expect them: in OpenAI's form, with `strict` if it is true."""
    return [_tool(tool, with_strict=True) for tool in tools or ()]


def _tool(tool: Tool, *, with_strict: bool) -> dict[str, Any]:
    assert tool.function is not None, "check_tools comes first"
    fields: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        fields["description"] = tool.function.description
    if tool.function.parameters is not None:
        fields["parameters"] = tool.function.parameters
    if with_strict and tool.function.strict:
        fields["strict"] = True
    return {"type": "function", "function": fields}


def template_calls(calls: Sequence[ToolCall], where: str) -> list[dict[str, Any]]:
    """Returns the calls of an earlier answer as chat templates expect them, with arguments as objects.
    where: their path."""
    check_count(where, calls, MAX_TOOL_CALLS, "calls")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        message = f"{where}.type is {call.type!r}, it must be 'function': other kinds of calls are not served. See {PAGE}"
        raise ApiError(message, param=f"{where}.type", code="unsupported_parameter")
    if call.function is None:
        raise missing(f"{where}.function")
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    named: dict[str, Any] = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Returns the arguments for a template, which writes an object's entries or its JSON. A text that is
    no JSON stays as it is; no value is an empty object."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return arguments
    return {} if value is None else value if isinstance(value, dict) else arguments
