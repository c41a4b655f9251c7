"""Rewrites `propertyNames` as keywords that can be enforced, where possible."""

from __future__ import annotations

from collections.abc import Mapping


def without_property_names(schema: Mapping[str, object]) -> dict[str, object]:
    """Returns the schema with properties or patternProperties instead of `propertyNames`; unchanged if that
    is impossible.

    {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": X} becomes an object with the properties a
    and b, each X, and no other.
    """
    names = schema.get("propertyNames")
    rest = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    if names is True:
        return rest
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return dict(schema)
    said = set(names) - {"type"}
    if not said:
        return rest
    if len(said) > 1 or {"properties", "patternProperties"} & set(schema):
        return dict(schema)
    values = schema.get("additionalProperties", True)
    if "pattern" in said:
        return {**rest, "patternProperties": {names["pattern"]: values}, "additionalProperties": False}
    listed = names["enum"] if "enum" in said else [names["const"]] if "const" in said else None
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return dict(schema)
    return {**rest, "properties": dict.fromkeys(listed, values), "additionalProperties": False}
