"""pydantic-ai: agents with tools, and its three ways to structured output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server

SESSION = Path(__file__).parent / "pydantic_ai_session.py"


@pytest.fixture(scope="module")
def told(tools_server: Server, scripted_server: Server, environment: Path) -> Any:
    return told_by(environment / "python", SESSION, tools_server, scripted_server)


def test_an_agent_calls_its_tool_and_answers(told: Any) -> None:
    chosen = told["chosen"]
    assert chosen["called"] == [[6, 7], [6, 7]]
    assert chosen["output"] == chosen["streamed"] == "It is 42."
    assert chosen["again"] == "It is still 42."
    assert [text.strip() for text in chosen["thinking"]] == ["Six times seven."]


@pytest.mark.parametrize("way", ["tool", "native"])
def test_output_that_is_enforced_is_of_the_class(told: Any, way: str) -> None:
    assert told[way]["output"] == told[way]["streamed"]
    assert told[way]["output"]["color"] in ("red", "green", "blue")
    assert 0 <= told[way]["output"]["count"] <= 99


def test_output_that_is_prompted_is_what_the_model_says(told: Any) -> None:
    assert told["prompted"]["output"] == told["prompted"]["streamed"] == {"color": "red", "count": 3}
