"""Random JSON schemas of which every text has a bound: lengths, numbers of items, ranges and enums are all
limited."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("name", "path", "count", "is_open", "items", "kind", "value", "key", "options", "level")
_WORDS = ("red", "green", "blue", "read", "write", "a b", "", "ünï", 'say "hi"', "1")
_PATTERNS = ("^[a-f0-9]{4}$", "^[A-Z][a-z]{2,6}$", "^(yes|no)$", "^\\d{2}:\\d{2}$")
_MAX_DEPTH = 2

Schema = dict[str, Any]


def random_schema(chance: random.Random) -> Schema:
    """Returns a schema; three of four are of an object."""
    if chance.random() < 0.75:
        return _object(chance, _MAX_DEPTH)
    return _any(chance, _MAX_DEPTH)


def _any(chance: random.Random, depth: int) -> Schema:
    leaves = [_enum, _string, _pattern, _integer, _constant, _simple]
    branches = [_object, _array, _union] if depth > 0 else []
    make = chance.choice([*leaves, *branches])
    return make(chance, depth - 1)


def _object(chance: random.Random, depth: int) -> Schema:
    names = chance.sample(_NAMES, chance.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _any(chance, depth) for name in names},
        "required": names[: chance.randint(0, len(names))],
        "additionalProperties": False,
    }


def _array(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.3:
        places = [_any(chance, depth) for _ in range(chance.randint(1, 3))]
        return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}
    least = chance.randint(0, 2)
    return {
        "type": "array", "items": _any(chance, depth), "minItems": least, "maxItems": least + chance.randint(0, 2)
    }  # fmt: skip


def _union(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth) for _ in range(2)]}


def _enum(chance: random.Random, depth: int) -> Schema:
    return {"enum": chance.sample([*_WORDS, 7, -1, 2.5, True, None], chance.randint(1, 4))}


def _string(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 10)}


def _pattern(chance: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": chance.choice(_PATTERNS)}


def _integer(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 999)}


def _constant(chance: random.Random, depth: int) -> Schema:
    return {"const": chance.choice(_WORDS)}


def _simple(chance: random.Random, depth: int) -> Schema:
    return {"type": chance.choice(["boolean", "null", ["boolean", "null"]])}
