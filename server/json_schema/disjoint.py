"""Proves that no value fits two members of a oneOf, which then allows the same values as anyOf. Grammars
can enforce only the latter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from urllib.parse import unquote

from headway.server.json_schema.keywords import TYPES
from headway.server.json_schema.places import value_at

MAX_MEMBERS = 64
MAX_STEPS = 8  # references followed and objects entered
MAX_WORK = 200_000  # compared values and names of one document, some 1 us each
_WORK_OF_A_PAIR = 15

_ALL = frozenset(TYPES) - {"integer"}  # integers are numbers


class Document:
    """A schema with everything that its references point to. Mutable: counts the work, which circular
    references multiply."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._work_left = MAX_WORK

    @property
    def is_too_much(self) -> bool:
        """Returns whether the limit of work is reached."""
        return self._work_left <= 0

    def count(self, *schemas: object) -> None:
        """Counts the comparison of the schemas."""
        lists = (
            s.get(name) for s in schemas if isinstance(s, dict) for name in ("enum", "required", "properties")
        )
        self._work_left -= _WORK_OF_A_PAIR + sum(len(one) for one in lists if isinstance(one, list | dict))

    def resolved(self, schema: object) -> object:
        """Returns the target of a reference; None, of which nothing is known, if there is none."""
        for _ in range(MAX_STEPS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = value_at(self._root, unquote(str(schema["$ref"])))
        return True


def are_disjoint(members: Sequence[object], document: Document) -> bool:
    """Returns whether no value fits two of the schemas, as far as types, constants and required properties
    prove it within the limits."""
    if len(members) > MAX_MEMBERS:
        return False
    return all(_is_disjoint(first, second, document, 0) for first, second in combinations(members, 2))


def _is_disjoint(first: object, second: object, document: Document, depth: int) -> bool:
    if depth > MAX_STEPS or document.is_too_much:
        return False
    a, b = document.resolved(first), document.resolved(second)
    document.count(a, b)
    if a is False or b is False:
        return True
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    common = _types(a) & _types(b)
    if not common:
        return True
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return {_key(value) for value in values}.isdisjoint(_key(other) for other in others)
    return common == {"object"} and _properties_differ(a, b, document, depth)


def _properties_differ(a: dict[str, object], b: dict[str, object], document: Document, depth: int) -> bool:
    """Returns whether a property that one of the two requires has schemas in both that no value fits."""
    mine, others = _properties(a), _properties(b)
    demanded = {name for schema in (a, b) for name in _strings(schema.get("required"))}
    return any(
        _is_disjoint(mine[name], others[name], document, depth + 1)
        for name in demanded & mine.keys() & others.keys()
    )


def _types(schema: dict[str, object]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset(_type_of(value) for value in values)
    named = schema.get("type")
    names = [named] if isinstance(named, str) else _strings(named)
    return frozenset("number" if name == "integer" else name for name in names) or _ALL


def _values(schema: dict[str, object]) -> list[object] | None:
    """Returns the only values that can fit; None if they are not listed."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _key(value: object) -> tuple[str, str]:
    """Returns equal keys for equal JSON values: 0, 0.0 and -0.0 are equal, 0 and false are not."""
    kind = _type_of(value)
    if isinstance(value, int | float) and kind == "number":
        return kind, repr(float(value) + 0.0)
    return kind, repr(value) if kind not in ("array", "object") else ""


def _properties(schema: dict[str, object]) -> dict[str, object]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _strings(value: object) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []
