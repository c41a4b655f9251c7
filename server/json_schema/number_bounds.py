"""Rewrites bounds and divisors of numbers so that the library's regular expressions allow exactly what the
bounds allow.

The library allows an excluded whole number if the other bound lies within the same whole step, and for a
bound with decimals it excludes numbers that are a prefix of the bound: with `maximum` 0.95 it accepts 0.9
only as a beginning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

from headway.server.json_schema.keywords import MAX_EXACT

MAX_DIGITS = 15  # any number of up to 15 digits is read exactly by the library
NEAREST_TO_ZERO = 1e-16  # numbers nearer to an excluded zero are not written


def number_constraint(keyword: str, value: float) -> dict[str, object]:
    """Returns a schema that allows the same numbers as a keyword of NUMBERS with this value."""
    return _divisor(value) if keyword == "multipleOf" else _bound(keyword, value)


def _bound(keyword: str, value: float) -> dict[str, object]:
    """Rewrites a bound: {"exclusiveMinimum": 0} becomes {"minimum": 1e-16}; {"maximum": 22.16} becomes
    that or {"type": "number", "maximum": 22.1}."""
    is_lower = keyword.endswith("inimum")
    faces_zero = value >= 0 if is_lower else value <= 0  # it excludes the smaller magnitudes
    is_exclusive = keyword.startswith("exclusive")
    plain = "minimum" if is_lower else "maximum"
    if faces_zero:
        return {plain: _next(value, is_lower)} if is_exclusive and value == int(value) else {keyword: value}
    cuts = list(_cuts(value))
    if not cuts:
        return {keyword: value}
    return {"anyOf": [{keyword: value}, *({"type": "number", plain: cut} for cut in cuts)]}


def _next(value: float, is_lower: bool) -> float:
    """Returns a number just beyond an excluded whole number, with few enough digits to be read exactly:
    1.00000000000001 for 1."""
    if value == 0:
        return NEAREST_TO_ZERO if is_lower else -NEAREST_TO_ZERO
    num_decimals = MAX_DIGITS - len(str(abs(int(value))))
    step = (
        Decimal(1).scaleb(-num_decimals) if num_decimals > 0 else Decimal(2 if abs(value) == MAX_EXACT else 1)
    )
    beyond = Decimal(int(value)) + (step if is_lower else -step)
    return float(beyond) if num_decimals > 0 else int(beyond)


def _cuts(value: float) -> Iterator[int | float]:
    """Yields the numbers whose digits are a prefix of the value's: 22.1 for 22.16, and 1 for 1.05, since 1
    may be written 1.0."""
    whole, _, decimals = f"{Decimal(repr(value)):f}".partition(".")
    if decimals.startswith("0") and int(whole) and decimals.strip("0"):
        yield int(whole)
    for place in range(1, len(decimals)):
        if decimals[place - 1] != "0" and decimals[place:].strip("0"):
            yield float(f"{whole}.{decimals[:place]}")


def _divisor(value: float) -> dict[str, object]:
    """Rewrites a divisor. The library requires all decimals of the divisor: 0.50 for 0.25.

    {"multipleOf": 0.25} becomes that or {"type": "number", "multipleOf": 0.5}, which allows one decimal.
    """
    step = Decimal(repr(value)).normalize()
    num_decimals = max(0, -int(step.as_tuple().exponent))
    coefficient = int(step.scaleb(num_decimals))
    steps: list[Decimal] = []
    for dropped in range(1, num_decimals):
        shorter = Decimal(math.lcm(coefficient, 10**dropped)).scaleb(-num_decimals)
        steps += [shorter] if shorter not in (step, *steps) else []
    if not steps:
        return {"multipleOf": value}
    return {
        "anyOf": [{"multipleOf": value}, *({"type": "number", "multipleOf": float(one)} for one in steps)]
    }
