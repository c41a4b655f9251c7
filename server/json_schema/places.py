"""Places within a JSON schema, as JSON pointers and as paths of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_INDEX = re.compile("[0-9]{1,9}", re.ASCII)


def field_path(place: str) -> str:
    """Returns a place as a path of fields: .properties.a.anyOf[0] for #/properties/a/anyOf/0."""
    parts = [part.replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:]]
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def value_at(document: object, place: str) -> object:
    """Returns the value at a place; None if there is none."""
    found = document
    for part in place.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        else:
            is_index = isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found)
            found = found[int(name)] if is_index and isinstance(found, list) else None
    return found


def keyword_places(schema: object, keyword: str, place: str = "#") -> list[str]:
    """Returns the places of a keyword in a checked schema, for an error of the library that names none."""
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


def patterns_in(schema: object) -> Iterator[str]:
    """Yields the regular expressions of a schema as it is enforced."""
    if isinstance(schema, list):
        for entry in schema:
            yield from patterns_in(entry)
    if isinstance(schema, Mapping):
        for name, entry in schema.items():
            if name == "pattern" and isinstance(entry, str):
                yield entry
            elif name == "patternProperties" and isinstance(entry, Mapping):
                yield from entry
            yield from patterns_in(entry)
