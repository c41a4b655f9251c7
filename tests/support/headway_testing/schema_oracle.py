"""Random JSON schemas where grammars go wrong most easily, values near what they allow, and an exact judge of
which are valid.

Numbers are decimals throughout, as they are written: no float stands between a text and the judgement.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema

Schema = Any
ALPHABET = 'ab"\\\né\x7f/\x01A'
ENUM_CHARACTERS = 'ab"\\\n\té\u2028😀/'
FORMATS = ("date", "ipv4", "uuid", "int32", "int8", "uint16")
TEXTS_OF_FORMATS = (
    "2024-02-29", "2023-02-29", "2024-13-01", "1.2.3.4", "1.2.3.256", "01.2.3.4", "123e4567-e89b-12d3-a456-426614174000", "123e4567",
)  # fmt: skip
INTEGER_RANGES = {"int32": (-(2**31), 2**31 - 1), "int8": (-128, 127), "uint16": (0, 65535)}
DIVISORS = ("1", "2", "3", "0.5", "0.25", "0.1", "0.01", "0.05", "1.5", "10")
MAX_DEPTH = 2


class SchemaWriter:
    """Writes random schemas. Mutable: its generator."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def schema(self, depth: int = 0) -> Schema:
        kind = self._chance.random()
        if depth < MAX_DEPTH and kind < 0.12:
            return self._object(depth)
        if depth < MAX_DEPTH and kind < 0.18:
            items = {"type": "array", "items": self.schema(depth + 1), "maxItems": self._chance.randint(1, 3)}
            return items | ({"minItems": 1} if self._chance.random() < 0.5 else {})
        if depth < MAX_DEPTH and kind < 0.24:
            return {self._chance.choice(["anyOf", "allOf"]): [self.schema(depth + 1), self.schema(depth + 1)]}
        if kind < 0.32:
            return self._constants()
        return self._number() if kind < 0.68 else self._string()

    def _object(self, depth: int) -> Schema:
        names = self._chance.sample(["a", "b", 'c"d', "é"], self._chance.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: self.schema(depth + 1) for name in names},
            "required": [name for name in names if self._chance.random() < 0.5],
            "additionalProperties": False,
        }

    def _constants(self) -> Schema:
        values = [self._constant() for _ in range(self._chance.randint(1, 3))]
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def _constant(self) -> Any:
        kind = self._chance.random()
        if kind < 0.4:
            return self._text(ENUM_CHARACTERS)
        if kind < 0.75:
            return float(self.decimal()) if self._chance.random() < 0.6 else self._chance.randint(-3, 3)
        return self._chance.choice([None, True, False, [], [1, "a"], {"a": '"'}])

    def decimal(self) -> Decimal:
        """Returns a number around 0: whole, half, or of up to three decimals."""
        kind = self._chance.random()
        if kind < 0.4:
            return Decimal(self._chance.randint(-3, 3))
        if kind < 0.6:
            return Decimal(self._chance.randint(-5, 5)) / 2
        if kind < 0.95:
            return Decimal(self._chance.randint(-2500, 2500)).scaleb(-self._chance.randint(1, 3))
        return Decimal(self._chance.choice(["22.16", "99.99", "-100.05", "1000", "-99.5", "9.999", "10.001"]))

    def _number(self) -> Schema:
        schema: dict[str, Any] = {}
        if self._chance.random() < 0.85:
            schema["type"] = self._chance.choice(["number", "number", "integer", ["number", "null"]])
        bounds = sorted((self.decimal(), self.decimal()))
        for names, bound in zip(
            (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")), bounds, strict=True
        ):
            if self._chance.random() < 0.75:
                schema[self._chance.choice(names)] = int(bound) if bound == int(bound) else float(bound)
        if self._chance.random() < 0.2:
            divisor = self._chance.choice(DIVISORS)
            schema["multipleOf"] = float(divisor) if "." in divisor else int(divisor)
        if schema.get("type") == "integer" and self._chance.random() < 0.2:
            schema["format"] = self._chance.choice(list(INTEGER_RANGES))
        return schema

    def _string(self) -> Schema:
        schema: dict[str, Any] = {"type": "string"} if self._chance.random() < 0.9 else {}
        kind = self._chance.random()
        if kind < 0.7:
            schema["pattern"] = self.pattern()
        elif kind < 0.8:
            schema["format"] = self._chance.choice(FORMATS[:3])
        if self._chance.random() < 0.4:
            schema["minLength"] = self._chance.randint(0, 2)
        if self._chance.random() < 0.4:
            schema["maxLength"] = self._chance.randint(1, 4)
        return schema

    def pattern(self) -> str:
        parts = []
        for _ in range(self._chance.randint(1, 3)):
            part = (
                self._set()
                if self._chance.random() < 0.7
                else self._chance.choice([r"\d", r"\W", r"\w", r"\S", ".", "a", r"\\", '"', "é"])
            )
            parts.append(part + self._chance.choice(["", "", "*", "+", "?", "{1,2}"]))
        body = self._chance.choice(["", "|"]).join(parts)
        body = f"(?:{body})" if "|" in body else body
        return self._chance.choice(["^", "^", "^", ""]) + body + self._chance.choice(["$", "$", "$", ""])

    def _set(self) -> str:
        members = self._chance.sample([
            "a", "b", '"', r"\\", r"\n", "é", r"\x7f", r"\t", r"\x01", "A", "/", " -~", "#-z", r"\x00-\x1f", r"\d", r"\s", r"\W", ",",
        ], self._chance.randint(1, 3))  # fmt: skip
        return f"[{self._chance.choice(['', '^'])}{''.join(members)}]"

    def _text(self, characters: str) -> str:
        return "".join(self._chance.choice(characters) for _ in range(self._chance.randrange(5)))

    def value(self, schema: Schema) -> Any:
        """Returns a value that may fit: of its kind, with decimals for numbers."""
        if self._chance.random() < 0.04:
            return self._constant()
        if "allOf" in schema or "anyOf" in schema:
            return self.value(self._chance.choice(schema.get("allOf") or schema["anyOf"]))
        if "const" in schema or "enum" in schema:
            found = self._chance.choice(schema.get("enum") or [schema["const"]])
            return Decimal(repr(found)) if isinstance(found, float) else found
        if "properties" in schema:
            return {
                name: self.value(inner)
                for name, inner in schema["properties"].items()
                if name in schema["required"] or self._chance.random() < 0.6
            }
        if "items" in schema:
            return [self.value(schema["items"]) for _ in range(self._chance.randint(0, 3))]
        if {"pattern", "format", "minLength", "maxLength"} & set(schema) and schema.get("type") != "integer":
            if "format" in schema:
                return self._chance.choice(TEXTS_OF_FORMATS)
            return self._text(ALPHABET)
        return self._near(schema)

    def _near(self, schema: Schema) -> Decimal:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        bounds = [Decimal(repr(schema[name])) for name in names if name in schema]
        bounds += [Decimal(end) for end in INTEGER_RANGES.get(schema.get("format"), ())]
        bound = self._chance.choice(bounds) if bounds else self.decimal()
        if "multipleOf" in schema and self._chance.random() < 0.5:
            step = Decimal(repr(schema["multipleOf"]))
            return (bound // step + self._chance.randint(-1, 1)) * step
        kind = self._chance.random()
        if kind < 0.25:
            return bound
        if kind < 0.45:
            return bound + Decimal(
                self._chance.choice(["1", "-1", "0.5", "-0.5", "0.1", "-0.1", "0.01", "-0.001", "0.00001"])
            )
        if kind < 0.65:  # its digits cut short
            digits = f"{bound:f}"
            return Decimal(digits[: self._chance.randint(1, len(digits))].rstrip(".-") or "0")
        return self.decimal() if kind < 0.9 else Decimal(int(bound))


def spellings(value: Any, chance: random.Random) -> Iterator[str]:
    """Yields texts of JSON for a value, the plainest first."""
    yield _text(value, chance, is_plain=True)
    yield _text(value, chance, is_plain=False)


def _text(value: Any, chance: random.Random, *, is_plain: bool) -> str:
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        if is_plain or not value:
            return text
        return chance.choice([json.dumps(value), text.replace("/", r"\/"), text.replace("a", r"\u0061")])
    if isinstance(value, dict):
        colon = ":" if is_plain else ": "
        members = (
            f"{json.dumps(name, ensure_ascii=False)}{colon}{_text(one, chance, is_plain=is_plain)}"
            for name, one in value.items()
        )
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return (
            "["
            + (", " if is_plain else ",").join(_text(one, chance, is_plain=is_plain) for one in value)
            + "]"
        )
    if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
        return _number_text(Decimal(str(value)), chance, is_plain=is_plain)
    return json.dumps(value)


def _number_text(value: Decimal, chance: random.Random, *, is_plain: bool) -> str:
    plain = f"{value.normalize():f}" if value else "0"
    if is_plain:
        return plain
    zeros = plain + ("0" if "." in plain else ".0")
    return chance.choice(
        [
            zeros,
            f"{zeros}0",
            f"{plain}e0",
            f"{value.scaleb(1).normalize():f}E-1",
            f"-{plain}" if value == 0 else plain,
        ]
    )


def _is_integer(_: Any, value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# ECMAScript writes these as Python does and means something else.
_PYTHONS = {"$": r"\Z", ".": r"[^\n\r\u2028\u2029]", r"\s": _SPACES, r"\S": f"[^{_SPACES}]"}


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    python = re.sub(r"\\.|[$.]", lambda found: _PYTHONS.get(found[0], found[0]), pattern)
    if isinstance(value, str) and re.search(python, value, re.ASCII) is None:
        yield jsonschema.ValidationError("pattern")


def _format(_: Any, name: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    low, high = INTEGER_RANGES.get(name, (None, None))
    if low is not None and _is_number(value):
        if not low <= value <= high:
            yield jsonschema.ValidationError("format")
    elif isinstance(value, str) and not _CHECKER.conforms(value, name):
        yield jsonschema.ValidationError("format")


_CHECKER = jsonschema.FormatChecker()
_JUDGE = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"pattern": _pattern, "format": _format},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer).redefine(
        "number", lambda _, v: _is_number(v)
    ),
)


class Judge:
    """Judges texts by one schema, with every number as the decimal that is written."""

    def __init__(self, schema: Schema) -> None:
        self._judge = _JUDGE(json.loads(json.dumps(schema), parse_float=Decimal))

    def is_valid(self, text: str) -> bool:
        value: bool = self._judge.is_valid(json.loads(text, parse_float=Decimal))
        return value
