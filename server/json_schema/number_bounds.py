"""Bounds and divisors of numbers, written such that the library's regular expressions for them allow what the
bounds allow.

The library takes an excluded whole number for an allowed one where the other bound lies in the same whole
step, and of a bound with decimals it forgets the numbers that are the bound cut short: with `maximum` 0.95 it
has 0.9 as a beginning only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

from headway.server.json_schema.keywords import MAX_EXACT

MAX_DIGITS = 15  # that the library reads exactly, whichever they are
NEAREST_TO_ZERO = 1e-16  # what lies nearer to an excluded zero is not written


def number_constraint(keyword: str, value: float) -> dict[str, object]:
    """Returns a schema that allows what a keyword of NUMBERS with this value allows."""
    return _divisor(value) if keyword == "multipleOf" else _bound(keyword, value)


def _bound(keyword: str, value: float) -> dict[str, object]:
    """{"exclusiveMinimum": 0} is {"minimum": 1e-16}; {"maximum": 22.16} is that or {"type": "number",
    "maximum": 22.1}."""
    is_lower = keyword.endswith("inimum")
    faces_zero = value >= 0 if is_lower else value <= 0  # what it shuts out has the smaller magnitudes
    is_exclusive = keyword.startswith("exclusive")
    plain = "minimum" if is_lower else "maximum"
    if faces_zero:
        return {plain: _next(value, is_lower)} if is_exclusive and value == int(value) else {keyword: value}
    cuts = list(_cuts(value))
    if not cuts:
        return {keyword: value}
    return {"anyOf": [{keyword: value}, *({"type": "number", plain: cut} for cut in cuts)]}


def _next(value: float, is_lower: bool) -> float:
    """Returns a number beyond an excluded whole one, of so few digits that it is read exactly:
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
    """Yields the numbers whose digits are the first of the value's: 22.1 for 22.16, and 1 for 1.05, which may
    be written 1.0."""
    whole, _, decimals = f"{Decimal(repr(value)):f}".partition(".")
    if decimals.startswith("0") and int(whole) and decimals.strip("0"):
        yield int(whole)
    for place in range(1, len(decimals)):
        if decimals[place - 1] != "0" and decimals[place:].strip("0"):
            yield float(f"{whole}.{decimals[:place]}")


def _divisor(value: float) -> dict[str, object]:
    """The library wants all decimals of a divisor: 0.50 for 0.25.

    {"multipleOf": 0.25} is that or {"type": "number", "multipleOf": 0.5}: what has one decimal.
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
