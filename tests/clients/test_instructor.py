"""instructor: objects of a class in each of its modes for OpenAI's API, whole and as they grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server

SESSION = Path(__file__).parent / "instructor_session.py"


@pytest.fixture(scope="module")
def told(tools_server: Server, scripted_server: Server, environment: Path) -> Any:
    python = environment.parent / "instructor/bin/python"
    return told_by(python, SESSION, tools_server, scripted_server)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_a_mode_that_is_enforced_gives_an_object(told: Any, mode: str) -> None:
    """A partial one is asked for by another tool, so that its values differ."""
    for item in told[mode].values():
        assert item["color"] in ("red", "green", "blue")
        assert 0 <= item["count"] <= 99


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_a_mode_that_is_asked_for_in_words_gives_what_the_model_says(told: Any, mode: str) -> None:
    assert told[mode] == {"item": {"color": "red", "count": 3}, "partial": {"color": "red", "count": 3}}
