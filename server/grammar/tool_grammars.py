"""The grammar of calls in the model's own format. If a tool is not strict, what the format cannot enforce
is left out and reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.engine import RequestError
from headway.server.formats import find_format
from headway.server.formats.text_values import ParameterError
from headway.server.grammar.frames import ToolCalls

Schema = dict[str, Any]


def tool_grammar_of(
    tools: Sequence[tuple[int, dict[str, Any]]],
    calls: ToolCalls,
    special_ids: Mapping[str, int],
    dropped: list[str],
) -> str:
    """Returns the Lark grammar. tools: as they are enforced, with their indices in the request. dropped:
    receives the paths of keywords.

    Raises RequestError for keywords of a strict tool that the format cannot enforce.
    """
    output_format = find_format(None, name=calls.output_format)

    def grammar(held: list[Schema]) -> str:
        return output_format.tool_grammar(
            held,
            required=calls.required or calls.text is not None,
            parallel=calls.parallel,
            special_ids=special_ids,
        )

    return grammar([_writable(i, tool, grammar, dropped) for i, tool in tools])


def _writable(i: int, tool: Schema, grammar: Callable[[list[Schema]], str], dropped: list[str]) -> Schema:
    """Returns a tool whose grammar can be written. i: its index in the request."""
    path = f"tools[{i}].function.parameters"
    while True:
        try:
            grammar([tool])
            return tool
        except ParameterError as error:
            simpler, place = _simpler(tool["function"]["parameters"], error)
            if tool["function"].get("strict"):
                message = f"{path}{place}: {error}"
                raise RequestError(message, param=path, code="invalid_value") from error
            dropped.append(path + place)
            tool = {**tool, "function": {**tool["function"], "parameters": simpler}}


def _simpler(schema: Schema, error: ParameterError) -> tuple[Schema, str]:
    """Returns the schema of a tool's parameters without what cannot be enforced, and the path of that."""
    if error.key is None:
        return {name: value for name, value in schema.items() if name != error.keyword}, f".{error.keyword}"
    properties = {**(schema.get("properties") or {})}
    required = list(schema.get("required") or [])
    held = properties.get(error.key)
    if error.keyword is None:
        properties.pop(error.key, None)
        kept = [name for name in required if name != error.key]
        return {**schema, "properties": properties, "required": kept}, f".properties.{error.key}"
    simpler = _without(held, error.keyword)
    properties[error.key] = simpler if simpler != held else {"type": "string"}
    return {**schema, "properties": properties}, f".properties.{error.key}.{error.keyword}"


def _without(schema: Any, keyword: str) -> Any:
    """Returns the schema without a keyword, also in the members of its unions."""
    if isinstance(schema, list):
        return [_without(member, keyword) for member in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without(value, keyword) if name in ("anyOf", "oneOf", "allOf") else value
        for name, value in schema.items()
        if name != keyword
    }
