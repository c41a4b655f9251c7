"""The keywords of JSON Schema by their treatment, and their valid values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal

PAGE = "/docs/api.md#structured-output"

ONE_SCHEMA = ("items", "additionalItems", "additionalProperties")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LENGTHS = ("minLength", "maxLength")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

# The keyword for the rest of an object or a list, by the keyword that describes the other part.
RESTS = {
    "properties": "additionalProperties", "patternProperties": "additionalProperties", "prefixItems": "items", "items": "additionalItems",
}  # fmt: skip

# Keywords that do not affect which values are valid. Names that begin with x- are accepted, too.
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment", "$anchor",
    "discriminator", "externalDocs", "xml", "propertyOrdering", "markdownDescription", "errorMessage", "enumNames",
))  # fmt: skip
# Values of refused keywords that have no effect.
NEUTRAL: dict[str, object] = {"uniqueItems": False, "nullable": False}
# Keywords that are known but not enforced, with what to do instead.
_SPLIT = "write the cases as members of anyOf"
REFUSED = {
    "not": "say what is allowed, by enum, type or pattern",
    "if": _SPLIT, "then": _SPLIT, "else": _SPLIT,
    "dependentRequired": _SPLIT, "dependentSchemas": _SPLIT, "dependencies": _SPLIT,
    "propertyNames": "use patternProperties with additionalProperties false",
    "contains": "use items or prefixItems", "minContains": "use minItems", "maxContains": "use maxItems",
    "uniqueItems": "leave it out and check the answer for repeated items",
    "unevaluatedItems": "use items false", "unevaluatedProperties": "use additionalProperties false",
    "contentEncoding": "use pattern", "contentMediaType": "use pattern", "contentSchema": "use pattern",
    "nullable": 'write the type as ["string", "null"], or with the type that you mean',
    "$dynamicRef": "use $ref", "$dynamicAnchor": "use $ref", "$recursiveRef": "use $ref", "$recursiveAnchor": "use $ref",
    "$vocabulary": "leave it out", "id": "leave it out",
    "x-guidance": "leave it out: it would change how the schema is enforced",
}  # fmt: skip
KNOWN = frozenset((
    *ONE_SCHEMA, *SCHEMA_LISTS, *SCHEMA_MAPS, *COUNTS, *NUMBERS, *ANNOTATIONS, *REFUSED, "type", "enum", "const", "required",
    "pattern", "format", "$ref", "$schema", "$id",
))  # fmt: skip
CONSTRAINTS = KNOWN - ANNOTATIONS

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# $schema -> whether `$ref` makes its neighbours void, and prefixItems is unknown.
DRAFTS = {
    "http://json-schema.org/draft-06/schema": True, "http://json-schema.org/draft-07/schema": True,
    "https://json-schema.org/draft/2019-09/schema": False, "https://json-schema.org/draft/2020-12/schema": False,
}  # fmt: skip
MAX_DIVISOR_DIGITS = 4  # a grammar has a state for each remainder
MAX_EXACT = 2**53  # numbers are compared as floats, which hold whole numbers exactly up to here
MIN_EXPONENT = -308


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def count_of(value: object) -> int | None:
    """Returns the value as a number of characters, items or properties, which may be written as 2.0; None
    for any other value."""
    if not is_number(value):
        return None
    assert isinstance(value, int | float), value
    return int(value) if 0 <= value <= MAX_EXACT and value == int(value) else None


def texts_in(value: object) -> Iterator[str]:
    """Yields the strings in a JSON value, including names of properties."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from texts_in(entry)


def num_digits(value: float) -> int:
    """Returns the number of significant digits: 1 for 0.01 and for 1000."""
    digits = f"{Decimal(repr(value)):f}".replace(".", "").strip("-0")
    return len(digits)


def inexact_number(value: object) -> int | float | None:
    """Returns a number in the value that cannot be compared exactly; None if there is none."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return next((found for entry in value if (found := inexact_number(entry)) is not None), None)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return None if abs(value) <= MAX_EXACT and _is_read_exactly(value) else value


def _is_read_exactly(value: float) -> bool:
    """Returns whether the library reads the number exactly: it divides the rounded digits by a power of
    ten, which misses some floats with 16 digits and more."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int), value
    if exponent >= 0:
        return True
    if exponent < MIN_EXPONENT:
        return False
    return float("".join(map(str, digits))) / 10.0**-exponent == abs(value)


def value_fault(keyword: str, value: object) -> str | None:
    """Returns what the value of a keyword without schemas must be; None if it is valid."""
    if keyword == "type":
        names = value if isinstance(value, list) and value else [value]
        is_fine = all(isinstance(name, str) and name in TYPES for name in names)
        return None if is_fine else f"one of {', '.join(TYPES)}, or a list of them"
    if keyword == "required":
        is_fine = isinstance(value, list) and all(isinstance(name, str) for name in value)
        return None if is_fine else "a list of names"
    if keyword == "enum":
        return None if isinstance(value, list) and value else "a list of one value or more"
    if keyword in COUNTS:
        return None if count_of(value) is not None else f"a whole number from 0 to {MAX_EXACT}"
    if keyword == "multipleOf":
        return (
            None
            if _is_divisor(value)
            else f"a number above 0 of at most {MAX_DIVISOR_DIGITS} digits, zeros at its ends not counted"
        )
    return None if keyword not in NUMBERS or is_number(value) else "a number"


def _is_divisor(value: object) -> bool:
    if not isinstance(value, int | float) or not is_number(value):
        return False
    return value > 0 and num_digits(float(value)) <= MAX_DIVISOR_DIGITS
