"""Translates the tools of /v1/responses to functions of a chat, and calls of these functions back.

All tools that the client runs become functions: those of a namespace get its name as a prefix, and a custom
tool gets its text as one argument. Tools that a server would have to run are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.generation.choice_output import NumberedCall
from headway.server.protocol.checks import check_count, missing, require
from headway.server.protocol.responses_api import (
    ChoiceOfTools,
    ResponsesRequest,
    ResponseTool,
    ToolReference,
)
from headway.server.protocol.responses_objects import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    SearchCallItem,
)
from headway.server.protocol.tools import (
    MAX_TOOLS,
    FunctionDefinition,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolChoice,
    allowed_tools,
)
from headway.server.protocol.unserved import PAGE

FUNCTION, CUSTOM, NAMESPACE, SEARCH = "function", "custom", "namespace", "tool_search"
TYPES = (FUNCTION, CUSTOM, NAMESPACE, SEARCH)
CALLABLE = (FUNCTION, CUSTOM)
ITEMS_WITH_TOOLS = ("additional_tools", "tool_search_output")
DEFAULT_NAMESPACE = "functions"  # the namespace of functions without another one
MAX_MENTIONED = 2048  # tools anywhere in a request
MAX_SHOWN = 64  # characters of a type that are compared and shown in errors
MISSPELT = 0.8  # a type at least this similar to one of TYPES counts as misspelt
INPUT = "input"  # the argument of a custom tool


def function_name(name: str, namespace: str | None) -> str:
    """Returns the model's name of a function in the namespace."""
    return name if namespace in (None, "", DEFAULT_NAMESPACE) else f"{namespace}__{name}"


def custom_arguments(text: str) -> str:
    """Returns the arguments that give a custom tool the text."""
    return msgspec.json.encode({INPUT: text}).decode()


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool that the client offers. where: its path in the request."""

    kind: str
    name: str
    namespace: str | None
    where: str

    @property
    def function_name(self) -> str:
        return function_name(self.name, self.namespace)

    def is_meant_by(self, reference: ToolReference | ChoiceOfTools) -> bool:
        if reference.type == NAMESPACE:
            return reference.name is not None and reference.name == self.namespace
        if reference.type == SEARCH:
            return self.kind == SEARCH
        return reference.type in CALLABLE and reference.name in (self.name, self.function_name)


@dataclass(slots=True)
class ResponseTools:
    """Mutable: filled from a request, then read.

    tools, choice: those of the chat. ignored: the paths of unserved tools, which have no effect. offered: the
    tools by the function's name.
    """

    tools: list[Tool] = field(default_factory=list)
    choice: ToolChoice | None = None
    ignored: list[str] = field(default_factory=list)
    offered: dict[str, Offered] = field(default_factory=dict)

    def item(self, call: NumberedCall, item_id: str, status: str) -> CallItem:
        """Returns the call under the name, and in the form, of the client's tool."""
        offered = self.offered.get(call.name) or Offered(FUNCTION, call.name, None, "")
        namespace = offered.namespace or UNSET
        if offered.kind == CUSTOM:
            text = _custom_text(call.arguments)
            return CustomCallItem(item_id, status, call.call_id, offered.name, text, namespace)
        if offered.kind == SEARCH:
            return SearchCallItem(item_id, status, call.call_id, _object(call.arguments) or {})
        return FunctionCallItem(item_id, status, call.call_id, offered.name, call.arguments, namespace)


def tools_of(body: ResponsesRequest, names: FieldNames) -> ResponseTools:
    """Raises ApiError for tools and choices that are not served, with the request's own paths."""
    found = ResponseTools()
    offer = _offer(body, found.ignored)
    offered = [one for one, _ in offer]
    found.choice, allowed = _choice(body.tool_choice, offered, found.ignored)
    for one, function in offer:
        if allowed is not None and one.function_name not in allowed:
            continue
        for path in (f"tools[{len(found.tools)}]", f"tools[{len(found.tools)}].function"):
            names.add(path, one.where)
        found.tools.append(function)
        found.offered.setdefault(one.function_name, one)
    return found


def served(tools: Sequence[ResponseTool]) -> list[ResponseTool]:
    return [tool for tool in tools if _is_served(tool)]


def _offer(body: ResponsesRequest, ignored: list[str]) -> list[tuple[Offered, Tool]]:
    """Returns the functions of `tools`, then those of the conversation, without repetitions: several
    searches may find the same tool."""
    check_count("tools", body.tools, MAX_TOOLS, "tools")
    given = [(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    added = [
        (f"input[{i}].tools[{j}]", tool)
        for i, item in enumerate(() if isinstance(body.input, str) else body.input)
        if item.type in ITEMS_WITH_TOOLS
        for j, tool in enumerate(item.tools or ())
    ]
    num_tools = sum(1 + len(tool.tools or ()) for _, tool in (*given, *added))
    limit = f"at most {MAX_MENTIONED}, with those in namespaces and those of the conversation"
    require(num_tools <= MAX_MENTIONED, "tools", f"{num_tools} tools", limit)
    offer = [function for where, tool in given for function in _functions(tool, where, ignored)]
    known = {offered.function_name for offered, _ in offer}
    for where, tool in added:
        for offered, function in _functions(tool, where, ignored):
            if offered.function_name not in known:
                known.add(offered.function_name)
                offer.append((offered, function))
    require(len(offer) <= MAX_TOOLS, "tools", f"{len(offer)} functions", f"at most {MAX_TOOLS}")
    return offer


def _is_served(tool: ResponseTool) -> bool:
    return tool.type in TYPES and not (tool.type == SEARCH and tool.execution != "client")


def _functions(
    tool: ResponseTool, where: str, ignored: list[str], namespace: str | None = None
) -> list[tuple[Offered, Tool]]:
    """Returns the functions of a tool."""
    if tool.type is None:
        raise missing(f"{where}.type")
    if not _is_served(tool) or (namespace is not None and tool.type not in CALLABLE):
        _check_spelling(tool.type, where)
        ignored.append(where)
        return []
    name = SEARCH if tool.type == SEARCH else tool.name
    if name is None:
        raise missing(f"{where}.name")
    if tool.type == NAMESPACE:
        return [
            function
            for j, one in enumerate(tool.tools or ())
            for function in _functions(one, f"{where}.tools[{j}]", ignored, name)
        ]
    definition = FunctionDefinition(
        function_name(name, namespace), tool.description, tool.parameters, tool.strict
    )
    if tool.type == CUSTOM:
        definition.parameters = _custom_parameters(tool)
    return [(Offered(tool.type, name, namespace, where), Tool("function", definition))]


def _custom_parameters(tool: ResponseTool) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string"}
    if tool.format is not UNSET and tool.format.definition is not None:
        kind = tool.format.syntax or "given"
        text["description"] = f"A text of this {kind} grammar:\n{tool.format.definition}"
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def _check_spelling(kind: str, where: str) -> None:
    close = difflib.get_close_matches(kind[:MAX_SHOWN], TYPES, 1, MISSPELT)
    if close and close[0] != kind:
        message = f"{where}.type is {kind[:MAX_SHOWN]!r}; did you mean {close[0]!r}?"
        raise ApiError(message, param=f"{where}.type", code="invalid_value")


def _choice(
    choice: str | ChoiceOfTools | None, offer: Sequence[Offered], ignored: list[str]
) -> tuple[ToolChoice | None, set[str] | None]:
    """Returns the choice of the chat, and the names of the functions that may be called; None allows all."""
    if not isinstance(choice, ChoiceOfTools):
        return choice, None
    if choice.type == "allowed_tools":
        return allowed_tools(choice.mode, choice.tools, "tool_choice", partial(_named, offer, ignored))
    if choice.type not in CALLABLE:
        message = (
            f"tool_choice.type is {choice.type[:64]!r}, it must be 'function', 'custom' or 'allowed_tools': this server "
            f"runs no tools itself. See {PAGE}"
        )
        raise ApiError(message, param="tool_choice.type", code="unsupported_parameter")
    if choice.name is None:
        raise missing("tool_choice.name")
    meant = [offered.function_name for offered in offer if offered.is_meant_by(choice)]
    name = choice.name if choice.name in meant or not meant else meant[0]
    return NamedChoice("function", NamedFunction(name)), None


def _named(offer: Sequence[Offered], ignored: list[str], tool: ToolReference, where: str) -> set[str]:
    if tool.type not in TYPES:
        _check_spelling(tool.type, where)
        ignored.append(where)
        return set()
    meant = {offered.function_name for offered in offer if offered.is_meant_by(tool)}
    require(bool(meant), f"{where}.name", repr(tool.name), "the name of one of the tools")
    return meant


def _custom_text(arguments: str) -> str:
    """Returns the text for a custom tool. The model may write it without the object around it."""
    value = _object(arguments)
    text = None if value is None else value.get(INPUT)
    return text if isinstance(text, str) else arguments


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
