"""Reduces a chat whose `tool_choice` allows only some of its tools to a chat with these tools."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from headway.server.base.field_names import FieldNames
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.checks import missing, require
from headway.server.protocol.tools import (
    AllowedTools,
    NamedChoice,
    NamedFunction,
    ToolReference,
    allowed_tools,
)


def with_allowed_tools(body: ChatRequest) -> tuple[ChatRequest, FieldNames]:
    """Returns the chat and the paths of its tools in the request. Raises ApiError for a tool that is not
    in the request."""
    choice = body.tool_choice
    names = FieldNames({})
    if not isinstance(choice, NamedChoice):
        return body, names
    if choice.type == "function" and choice.function is None and choice.name is not None:
        return replace(body, tool_choice=NamedChoice("function", NamedFunction(choice.name))), names
    if choice.type != "allowed_tools":
        return body, names
    is_flat = choice.allowed_tools is None
    where = "tool_choice" if is_flat else "tool_choice.allowed_tools"
    allowed = choice.allowed_tools or AllowedTools(choice.mode, choice.tools)
    given = [None if tool.function is None else tool.function.name for tool in body.tools or ()]
    mode, wanted = allowed_tools(allowed.mode, allowed.tools, where, partial(_named, given))
    kept = [i for i, name in enumerate(given) if name in wanted]
    for place, i in enumerate(kept):
        names.add(f"tools[{place}]", f"tools[{i}]")
    tools = [tool for i, tool in enumerate(body.tools or ()) if i in kept]
    return replace(body, tools=tools or None, tool_choice=mode), names


def _named(given: list[str | None], tool: ToolReference, where: str) -> list[str]:
    require(tool.type == "function", f"{where}.type", repr(tool.type[:64]), "'function'")
    name = tool.name if tool.function is None else tool.function.name
    if name is None:
        raise missing(f"{where}.function.name")
    path = f"{where}.name" if tool.function is None else f"{where}.function.name"
    require(name in given, path, repr(name[:200]), "the name of one of the tools")
    return [name]
