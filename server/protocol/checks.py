"""Refusals of single values; each names the field, the value and the limit."""

from __future__ import annotations

from collections.abc import Sequence

from headway.server.base.errors import ApiError


def require(is_met: bool, name: str, value: object, limit: str) -> None:
    if not is_met:
        raise ApiError(f"{name} is {value}, it must be {limit}", param=name, code="invalid_value")


def missing(path: str) -> ApiError:
    return ApiError(f"{path} is missing; it is required", param=path, code="missing_required_parameter")


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Refuses values out of the range, and NaN. None means no value."""
    require(value is None or low <= value <= high, name, value, f"{low} to {high}")


def check_count(name: str, values: Sequence[object] | None, limit: int, what: str) -> None:
    num_values = len(values or ())
    require(num_values <= limit, name, f"a list of {num_values} {what}", f"one of at most {limit}")


def check_strings(name: str, texts: Sequence[str], limit: int, max_characters: int) -> None:
    check_count(name, texts, limit, "strings")
    for text in texts:
        require(text != "", name, "an empty string", "a string of 1 character or more")
        wanted = f"a string of at most {max_characters}"
        require(len(text) <= max_characters, name, f"a string of {len(text)} characters", wanted)
