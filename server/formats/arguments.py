"""The arguments of calls: JSON objects as the model wrote them, and values written as text, which are read
by the schema of their parameter."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from headway.server.formats.cursor import NoCallError
from headway.server.formats.pieces import ToolCall
from headway.server.json_schema.places import value_at

MAX_NAME = 256  # characters of the name of a tool or a parameter
Tell = Callable[[ToolCall], None]
Schema = Mapping[str, Any]
Schemas = Mapping[str, Schema]  # the schema of the arguments by the name of the tool
_JSON = msgspec.json.Decoder(msgspec.Raw)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_STRING = msgspec.json.Decoder(str)
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"?|,\s*[}\]]|\b(?:True|False|None)\b', re.DOTALL)
_PIECES = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})|\\'|\\|[\x00-\x1f]")
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_TYPES = (
    (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (type(None), "null"), (Mapping, "object"), (Sequence, "array"),
)  # fmt: skip


def schemas_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Schema]:
    """Returns the schemas of the tools, which are in OpenAI's form. A tool without parameters takes an
    empty object."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {function["name"]: _dereferenced(function.get("parameters") or {}) for function in functions}


def _dereferenced(root: Schema) -> Schema:
    """Returns the schema. If it only refers to one of its definitions, returns that definition together
    with the others."""
    around = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    schema, seen = root, set[str]()
    while isinstance(reference := schema.get("$ref"), str) and not set(schema) - {"$ref", *around}:
        target = resolve(reference, root)
        if reference in seen or not isinstance(target, Mapping) or set(target) & set(around):
            return root
        seen.add(reference)
        schema = {**around, **target}
    return schema


def members(text: str) -> dict[str, str]:
    """Returns the members of a JSON object as JSON texts. Raises NoCallError for any other text."""
    try:
        return {key: bytes(raw).decode() for key, raw in _OBJECT.decode(text.encode()).items()}
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of encodings are ValueErrors
        raise NoCallError from error


def object_text(text: str) -> str:
    """Returns the text of a JSON object, which may be wrapped in a JSON string. Raises NoCallError."""
    if text.startswith('"'):
        try:
            text = _STRING.decode(text.encode())
        except ValueError as error:
            raise NoCallError from error
    members(text)
    return text.strip()


def call_of(
    text: str, argument_keys: Sequence[str], known: Collection[str] = (), *, arguments_required: bool = False
) -> ToolCall:
    """Returns the call that a JSON object describes: its "name", and the arguments under the first of the
    keys that it has.

    known: the names of the request's tools. A call of one of these may be nearly valid JSON, which is
    repaired.
    """
    try:
        found = members(text)
    except NoCallError:
        found = members(mended(text))
        if _name(found) not in known:
            raise
    arguments = next((found[key] for key in argument_keys if key in found), None)
    if arguments is None and arguments_required:
        raise NoCallError
    name = _name(found)
    if name in known:
        return ToolCall(name, lenient_object(arguments or "{}"))
    return ToolCall(name, object_text(arguments or "{}"))


def arguments_of(name: str, text: str, known: Collection[str]) -> ToolCall:
    """Returns the call of a tool whose arguments are written after its name."""
    name = plain_name(name)
    return ToolCall(name, lenient_object(text) if name in known else object_text(text))


def _name(found: Mapping[str, str]) -> str:
    try:
        return _STRING.decode(found.get("name", "").encode())
    except ValueError as error:
        raise NoCallError from error


def lenient_object(text: str) -> str:
    """Like `object_text`, for a tool of the request: no value is an empty object, and JSON that is nearly
    valid is repaired."""
    try:
        return object_text(text)
    except NoCallError:
        text = mended(text)
    if text.startswith('"'):
        try:
            text = mended(_STRING.decode(text.encode()))
        except ValueError as error:
            raise NoCallError from error
    return "{}" if text.strip() in ("", "null", "[]") else object_text(text)


def mended(text: str) -> str:
    """Returns the text with what models often write instead of JSON repaired: control characters and
    invalid escapes in strings, commas before closing brackets, and Python's constants."""
    return _TOKENS.sub(_mended_token, text)


def _mended_token(match: re.Match[str]) -> str:
    token = match.group()
    if token.startswith('"'):
        return _PIECES.sub(_mended_piece, token)
    return token[1:] if token.startswith(",") else _PYTHONS[token]


def _mended_piece(match: re.Match[str]) -> str:
    """Escapes a backslash that begins no escape of JSON. A backslash before an apostrophe is dropped."""
    piece = match.group()
    if len(piece) == 1:
        return json.dumps(piece)[1:-1]
    return "'" if piece == "\\'" else piece


def types_of(schema: Any, root: Any) -> set[str]:
    """Returns the JSON types that a schema names; empty if it names none. root: the schema within which
    references are resolved."""
    types, left = set[str](), [schema]
    for one in resolved(left, root):
        declared, values = one.get("type"), one.get("enum")
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, list):
            types |= {name for name in declared if isinstance(name, str)}
        else:
            constants = values if isinstance(values, list) else [one[k] for k in ("const",) if k in one]
            types |= {type_name(value) for value in constants}
            unions = (one.get(name) for name in ("anyOf", "oneOf", "allOf"))
            left += [member for union in unions if isinstance(union, list) for member in union]
        if one.get("nullable"):
            types.add("null")
    return types


def resolved(left: list[Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the schemas of a list, from its end, to which the caller may add. A reference is replaced by
    its target; non-objects and repeated references are skipped."""
    seen = set[str]()
    while left:
        one = left.pop()
        if not isinstance(one, Mapping):
            continue
        if isinstance(reference := one.get("$ref"), str):
            left += [] if reference in seen else [resolve(reference, root)]
            seen.add(reference)
            continue
        yield one


def resolve(reference: str, root: Any) -> object:
    """Returns the target of a reference within the document; None if there is none. Names may be
    percent-encoded."""
    return value_at(root, unquote(reference))


def type_name(value: object) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def value_of(text: str, schema: Any, root: Any) -> str:
    """Returns the value of a parameter's text, by the parameter's schema, as JSON in the model's own
    spelling.

    A parameter that can only be a string takes the text as it is. For others JSON and Python's literals are
    read; the text stays a string if the result is not of the schema's types.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return quoted(text)
    try:
        value = literal(text)
    except NoCallError:
        return quoted(text)
    kind = _type_of(value)
    if "string" in types:
        allowed = types | ({"integer"} if "number" in types else set())
        is_pythons = kind == "string" and value != text.strip()  # its quotes may be those of a text
        return quoted(text) if kind not in allowed or is_pythons else value
    if kind == "number" and "integer" in types and "number" not in types and float(value).is_integer():
        return str(int(float(value)))
    return value


def json_text(text: str) -> str:
    """Returns JSON without surrounding whitespace. Raises NoCallError for any other text."""
    try:
        return bytes(_JSON.decode(text.encode())).decode()
    except (ValueError, RecursionError) as error:  # msgspec's errors and those of encodings are ValueErrors
        raise NoCallError from error


def literal(text: str) -> str:
    """Returns the value of a text in JSON, or of a Python literal, as JSON, with the constants of either
    language. Raises NoCallError for any other text."""
    try:
        return json_text(text)
    except NoCallError:
        pass
    try:
        with warnings.catch_warnings(action="ignore"):
            expression = ast.parse(text.strip(), mode="eval")
        value = json.dumps(
            ast.literal_eval(_JsonNames().visit(expression)), ensure_ascii=False, allow_nan=False
        )
        value.encode()  # raises at half a surrogate pair, which an escape in a literal can give
        return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise NoCallError from error


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names of constants by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _type_of(value: str) -> str:
    """Returns the type of a JSON text."""
    types = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return types.get(value[0]) or ("integer" if value.removeprefix("-").isdecimal() else "number")


def literal_or_text(text: str) -> str:
    try:
        return literal(text)
    except NoCallError:
        return quoted(text)


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def object_of(arguments: Mapping[str, str]) -> str:
    """Returns arguments whose values are JSON as a JSON object."""
    return "{" + ", ".join(f"{quoted(name)}: {value}" for name, value in arguments.items()) + "}"


def parameter_schema(schema: Any, key: str) -> Any:
    """Returns the schema of one parameter; empty if the tool does not declare it."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties.get(key, {}) if isinstance(properties, dict) else {}


def plain_name(name: str) -> str:
    """Returns the name of a tool without surrounding whitespace. Raises NoCallError if it is empty or has
    several words."""
    name = name.strip()
    if not name or len(name.split()) > 1:
        raise NoCallError
    return name
