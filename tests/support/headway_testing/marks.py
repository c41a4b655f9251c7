"""Marks for parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(plain: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values as parameters of which those that are not plain belong to the slow suite."""
    kept = list(plain)
    return [value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values]
