"""Arguments of calls: JSON objects as the model wrote them, and values that it wrote as text, by the schema of the parameter."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.server.formats.cursor import NoCallError
from headway.server.formats.pieces import ToolCall

MAX_NAME = 256  # characters of a name of a tool or a parameter
Tell = Callable[[ToolCall], None]
Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # by the name of the tool: the schema of its arguments
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_TYPES = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (type(None), "null"), (Mapping, "object"), (Sequence, "array"),
)  # fmt: skip
_DEEPEST_REF = 8


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Schema]:
    """Returns the schemas of the tools, which come in OpenAI's form. A tool without parameters takes an empty object."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def members(text: str) -> dict[str, str]:
    """Returns the members of a JSON object as JSON texts. Raises NoCallError where the text is none."""
    try:
        return {key: bytes(raw).decode() for key, raw in _OBJECT.decode(text.encode()).items()}
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of encodings are ValueErrors
        raise NoCallError from error


def object_text(text: str) -> str:
    """Returns the text of a JSON object; one that is written as a JSON string is unwrapped. Raises NoCallError."""
    if text.startswith('"'):
        try:
            text = _STRING.decode(text.encode())
        except ValueError as error:
            raise NoCallError from error
    members(text)
    return text.strip()


def call_of(text: str, argument_keys: Sequence[str], *, arguments_required: bool = False) -> ToolCall:
    """Returns the call that a JSON object states: its "name" and the arguments under the first of the keys that it has."""
    found = members(text)
    arguments = next((found[key] for key in argument_keys if key in found), None)
    if "name" not in found or (arguments is None and arguments_required):
        raise NoCallError
    try:
        name = _STRING.decode(found["name"].encode())
    except ValueError as error:
        raise NoCallError from error
    return ToolCall(name, object_text(arguments or "{}"))


def types_of(schema: Any, root: Any, depth: int = 0) -> set[str]:
    """Returns the JSON types that a schema allows by its words; empty where it says nothing. root: the schema that references are in."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST_REF:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolve(reference, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        types = {declared}
    elif isinstance(declared, list):
        types = {name for name in declared if isinstance(name, str)}
    else:
        values = (
            schema["enum"]
            if isinstance(schema.get("enum"), list)
            else [schema[k] for k in ("const",) if k in schema]
        )
        types = {type_name(value) for value in values}
        for union in ("anyOf", "oneOf", "allOf"):
            for choice in schema.get(union) or ():
                types |= types_of(choice, root, depth + 1)
    return types | ({"null"} if schema.get("nullable") else set())


def resolve(reference: str, root: Any) -> Any:
    """Returns what a reference within the document points to, or None."""
    place = root
    for part in reference.removeprefix("#").split("/")[1:]:
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def type_name(value: object) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def value_of(text: str, schema: Any, root: Any) -> Any:
    """Returns the value that a parameter's text stands for, by the parameter's schema.

    A parameter that can only be a string takes the text as it is. Else JSON and Python's literals are read; the text stays where
    they are not of the schema's types.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    try:
        value = literal(text)
    except NoCallError:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    allowed = types | ({"integer"} if "number" in types else set())
    return text if "string" in types and type_name(value) not in allowed else value


def literal(text: str) -> Any:
    """Returns the value of a text in JSON or of a literal in Python. Raises NoCallError where it is neither."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):
            value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise NoCallError from error
    return value


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def dump(arguments: Mapping[str, Any]) -> str:
    """Returns the arguments as JSON text. Raises NoCallError where they are no JSON."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()  # raises at half a surrogate pair, which an escape in a literal can give
        return text
    except (ValueError, TypeError, RecursionError) as error:
        raise NoCallError from error


def literal_or_text(text: str) -> Any:
    try:
        return literal(text)
    except NoCallError:
        return text


def parameter_schema(schema: Any, key: str) -> Any:
    """Returns the schema of one parameter, empty where the tool does not declare it."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key, {}) if isinstance(properties, dict) else {}


def plain_name(name: str) -> str:
    """Returns the name of a tool without whitespace around it. Raises NoCallError where it is empty or of several words."""
    name = name.strip()
    if not name or len(name.split()) > 1:
        raise NoCallError
    return name
