"""Grammars of parameters that are written as text between tags: strings as they are, and other values as
JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engine import RequestError
from headway.server.formats.arguments import resolve, resolved, types_of
from headway.server.formats.lark import ANY, Lark

# Keywords that are allowed beside the properties of a tool; any other would relate parameters, which are
# written one by one.
_AT_THE_TOP = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "default", "examples", "$schema", "$defs")
) | {"definitions", "strict", "$id", "$comment"}  # fmt: skip
_UNCONSTRAINED = frozenset(
    ("type", "title", "description", "default", "examples", "$comment", "nullable", "deprecated")
)
_PLAIN = frozenset(("pattern", "format", "minLength", "maxLength"))
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATE = "[0-9]{3}[1-9]-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[A-Za-z0-9_+-]{1,64}@[a-z0-9-]{1,63}(\.[a-z]{2,24}){1,3}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
    "uri": r"[a-z][a-z0-9+.-]{0,15}://[A-Za-z0-9._~/?&=%-]{1,500}",
}
# A text that is no literal of JSON or Python, for a parameter that may be a string or something else.
_NO_LITERAL = rf"([^\s0-9\[{{(+.-]{ANY})?"
_NO_LINE_BREAKS = rf"([^\n]({ANY}[^\n])?)?"  # at either end


class ParameterError(RequestError):
    """A part of a tool's schema that a format cannot enforce. key: the parameter; None for the whole
    schema. keyword: the keyword of its schema; None for its name."""

    def __init__(self, message: str, tool: str, key: str | None, keyword: str | None) -> None:
        super().__init__(message, code="invalid_value", param="tools")
        self.tool = tool
        self.key = key
        self.keyword = keyword


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tool. root: the schema within which references are resolved. where: its name in
    errors."""

    tool: str
    key: str
    schema: Mapping[str, Any]
    root: Mapping[str, Any]
    is_required: bool
    where: str

    @property
    def is_string(self) -> bool:
        return types_of(self.schema, self.root) == {"string"}

    def refuse(self, keyword: str, value: str = "") -> ParameterError:
        told = f"{keyword}: {value}" if value else keyword
        return ParameterError(
            f"{self.where}: {told!r} cannot be enforced on a string in this model's tool format; leave it out, or send the tool without strict",
            self.tool,
            self.key,
            keyword,
        )

    def refuse_name(self, why: str) -> ParameterError:
        return ParameterError(f"{self.where}: {why}", self.tool, self.key, None)


def parameters_of(tool: str, schema: Mapping[str, Any], *, forbidden: str) -> list[Parameter]:
    """Returns the parameters of a tool in the schema's order. forbidden: characters that no parameter's
    name may have."""
    for keyword in schema:
        if keyword not in _AT_THE_TOP and not keyword.startswith("x-"):
            raise ParameterError(
                f"the parameters of the tool {tool!r}: {keyword!r} cannot be enforced in this model's tool format; leave it out, or send the tool without strict",
                tool,
                None,
                keyword,
            )
    required = list(schema.get("required") or [])
    properties = dict(schema.get("properties") or {})
    properties |= {key: {} for key in required if key not in properties}
    parameters = []
    for key, one in properties.items():
        where = f"the parameter {key!r} of the tool {tool!r}"
        parameter = Parameter(
            tool, key, one if isinstance(one, Mapping) else {}, schema, key in required, where
        )
        if not key or set(key) & set(forbidden):
            raise parameter.refuse_name("its name cannot be written in this model's tool format; use another")
        parameters.append(parameter)
    return parameters


def json_value(lark: Lark, parameter: Parameter) -> str:
    """Returns an expression for the parameter's value as JSON."""
    names = [name for name in ("$defs", "definitions") if name in parameter.root]
    return lark.json({**parameter.schema, **{name: parameter.root[name] for name in names}})


def text_value(
    lark: Lark, parameter: Parameter, closer: str, excluded: Sequence[str], *, is_bare: bool = False
) -> str:
    """Returns an expression for the parameter's value and its closing tag, as `value_of` reads values.
    is_bare: a line break at either end of a string does not belong to the value."""
    if parameter.is_string:
        return string_text(lark, parameter, closer, excluded, is_bare=is_bare)
    value = f"{json_value(lark, parameter)} {lark.literal(closer)}"
    if not _is_any_string(parameter.schema, parameter.root):
        return lark.rule(value)
    return lark.rule(f"{value} | {lark.text(closer, excluded=excluded, patterns=[_NO_LITERAL])}")


def string_text(
    lark: Lark, parameter: Parameter, closer: str, excluded: Sequence[str], *, is_bare: bool = False
) -> str:
    """Returns an expression for the text of a string and its closing tag. Raises RequestError for what
    cannot be enforced."""
    texts = []
    for branch in _string_branches(parameter):
        values = branch.get("enum", [branch["const"]] if "const" in branch else None)
        if values is None:
            patterns = [*_patterns(parameter, branch), *([_NO_LINE_BREAKS] if is_bare else ())]
            texts.append(lark.text(closer, excluded=excluded, patterns=patterns))
            continue
        if any(tag in value for value in values for tag in excluded):
            raise parameter.refuse("enum")
        for value in values:
            frame = "\n" if is_bare and value != value.strip("\n") else ""
            texts.append(lark.literal(f"{frame}{value}{frame}{closer}"))
    return lark.rule(" | ".join(texts))


def _string_branches(parameter: Parameter) -> list[Mapping[str, Any]]:
    """Returns the schemas of which the text must match one, without references and unions."""
    branches, left, seen = list[Mapping[str, Any]](), list[Any]([parameter.schema]), set[str]()
    while left:
        schema = left.pop(0)
        if not isinstance(schema, Mapping):
            branches += [{}] if schema is True else []
            continue
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in seen:
                left.insert(0, resolve(reference, parameter.root))
            seen.add(reference)
            continue
        union = next((name for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
        if union is None or (union == "allOf" and _is_conjunction(schema)):
            branches.append(schema)
        elif set(schema) - _UNCONSTRAINED - {union} or (union == "allOf" and len(schema[union]) != 1):
            raise parameter.refuse(union)
        else:
            left = [*schema[union], *left]
    return branches


def _is_conjunction(schema: Mapping[str, Any]) -> bool:
    """Returns whether the schema and the members of its allOf have only patterns, formats and lengths, as
    enforceable() writes formats."""
    parts = [{name: value for name, value in schema.items() if name != "allOf"}, *schema["allOf"]]
    return all(isinstance(part, Mapping) and not set(part) - _UNCONSTRAINED - _PLAIN for part in parts)


def _patterns(parameter: Parameter, schema: Mapping[str, Any]) -> list[str]:
    """Returns regular expressions that a text of the schema matches as a whole."""
    patterns = [ANY]
    for keyword, value in schema.items():
        if keyword == "pattern":
            patterns.append(_whole(value))
        elif keyword == "format" and value in _FORMATS:
            patterns.append(_FORMATS[value])
        elif keyword == "allOf":
            patterns += [one for member in value for one in _patterns(parameter, member) if one != ANY]
        elif keyword not in _UNCONSTRAINED and keyword not in ("minLength", "maxLength"):
            raise parameter.refuse(keyword, str(value) if keyword == "format" else "")
    if "minLength" in schema or "maxLength" in schema:
        patterns.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    return patterns if len(patterns) == 1 else patterns[1:]


def _whole(pattern: str) -> str:
    """Returns a regular expression that matches whole texts in which the pattern is found; it may not
    match all of them."""
    start = "" if pattern.startswith("^") else ANY
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else ANY
    return f"{start}({pattern.removeprefix('^')[: len(pattern) if end else -1]}){end}"


def _is_any_string(schema: Any, root: Any) -> bool:
    """Returns whether the schema allows every string."""
    left = [schema]
    for one in resolved(left, root):
        union = next((name for name in ("anyOf", "oneOf") if name in one), None)
        if set(one) - _UNCONSTRAINED - {union}:
            continue
        if union is None and "string" in types_of(one, root):
            return True
        left += one[union] if union is not None else []
    return False
