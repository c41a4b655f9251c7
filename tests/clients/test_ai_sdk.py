"""Vercel's AI SDK under Node: text, tools, reasoning and objects, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server
from headway_testing.tools import installed

from headway.server.responses_api.carried_reasoning import carried_text

SESSION = Path(__file__).parent / "ai_sdk_session.mjs"
COLORS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def told(tools_server: Server, scripted_server: Server) -> Any:
    return told_by(installed("node"), SESSION, tools_server, scripted_server)


def test_an_agent_runs_its_tool_and_answers(told: Any) -> None:
    generated = told["generated"]
    assert (generated["text"], generated["steps"], generated["reason"]) == ("It is 42.", 2, "tool-calls")
    assert generated["results"] == [42]
    assert generated["reasoning"].strip() == "Six times seven."
    assert generated["usage"]["reasoningTokens"] > 0
    assert told["called"] == [[6, 7], [6, 7]]


def test_a_streamed_agent_says_the_same(told: Any) -> None:
    streamed = told["streamed"]
    assert streamed["errors"] == []
    assert (streamed["text"], streamed["steps"]) == ("It is 42.", 2)
    assert streamed["calls"] == [{"a": 6, "b": 7}]
    assert streamed["reasoning"] == told["generated"]["reasoning"]


@pytest.mark.parametrize("choice", ["required", "pick"])
def test_a_tool_that_must_be_called_is_called(told: Any, choice: str) -> None:
    calls = told[f"choice {choice}"]
    assert calls
    assert all(name == "pick" and values["color"] in COLORS for name, values in calls)


def test_objects_are_of_their_schema(told: Any) -> None:
    for item in (told["object"], told["streamObject"]["object"], told["output"]):
        assert item["color"] in COLORS
        assert 0 <= item["count"] <= 99
    assert told["streamObject"]["object"] == told["object"]
    assert told["streamObject"]["partials"] > 0
    assert told["choice"] in ("sun", "rain")
    assert told["noSchema"] == {"any": [1]}


def test_the_responses_api_is_spoken_without_a_store(told: Any) -> None:
    responses = told["responses"]
    assert (responses["text"], responses["streamed"]) == ("It is 42.", "It is 42.")
    assert (responses["steps"], responses["reason"]) == (2, "stop")
    assert responses["deltas"] > 1
    assert responses["usage"]["reasoningTokens"] > 0
    assert "store: false" in told["reference"]


def test_reasoning_goes_back_from_step_to_step(told: Any) -> None:
    """Of two steps, whole and streamed: what the SDK takes for encrypted, without a wish of the user's."""
    first, second, streamed_first, streamed_second = told["responses"]["carried"]
    assert (first, streamed_first) == ([], [])
    for (item,) in (second, streamed_second):
        assert item["summary"] == []
        assert carried_text(item["encrypted_content"], "x") == "Six times seven."
    assert told["responses"]["warnings"] == []
