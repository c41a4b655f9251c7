"""The acceptance profiles of `make bench-depth`: how often the draft at each position is accepted. Knows
numbers only."""

from __future__ import annotations

from typing import NamedTuple

# Unconditional, by position.
STATIONARY: dict[str, tuple[float, ...]] = {
    "high": (0.9, 0.8, 0.7),
    "medium": (0.7, 0.5, 0.35),
    "low": (0.3, 0.1, 0.03),
}
ALTERNATING = "switching"
ALTERNATED = ("high", "low")
PROFILES = (*STATIONARY, ALTERNATING)


class Spell(NamedTuple):
    """Rounds of one profile. rates: unconditional, by position."""

    rates: tuple[float, ...]
    seconds: float


def rates_of(name: str, depth: int) -> tuple[float, ...]:
    """Returns as many rates as there are drafts. Beyond the positions of the profile they fall as between its
    last two."""
    rates = list(STATIONARY[name])
    while len(rates) < depth:
        rates.append(rates[-1] * rates[-1] / rates[-2])
    return tuple(rates[:depth])


def expected_tokens(rates: tuple[float, ...], depth: int) -> float:
    """Returns the tokens of a row in a round of this depth."""
    return 1 + sum(rates[:depth])
