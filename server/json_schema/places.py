"""Places within a JSON schema, as JSON pointers and as paths of fields."""

from __future__ import annotations

from collections.abc import Mapping


def field_path(place: str) -> str:
    """Returns a place as a path of fields: .properties.a.anyOf[0] for #/properties/a/anyOf/0."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:]]
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def keyword_places(schema: object, keyword: str, place: str = "#") -> list[str]:
    """Returns where a checked schema has a keyword, for a refusal of the library's that names no place."""
    if isinstance(schema, list):
        return [
            found
            for i, entry in enumerate(schema)
            for found in keyword_places(entry, keyword, f"{place}/{i}")
        ]
    if not isinstance(schema, Mapping):
        return []
    here = [place] if keyword in schema else []
    return here + [
        found
        for name, entry in schema.items()
        for found in keyword_places(entry, keyword, f"{place}/{escaped(name)}")
    ]
