"""LangChain: invoke, stream, batch, log-probabilities, history of its own message classes, tools and
structured output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server

HERE = Path(__file__).parent
COLORS = ("red", "green", "blue")


def test_langchain_works_from_invoke_to_history(chat_server: Server, environment: Path) -> None:
    told = told_by(environment / "python", HERE / "langchain_session.py", chat_server)
    assert told["stream"] == told["invoke"] == "".join(told["tokens"]) == told["batch"][0] != ""
    assert (
        [usage["output_tokens"] for usage in told["stream_usage"]] == [told["usage"]["output_tokens"]] == [16]
    )
    assert len(told["batch"]) == 2
    assert told["history"] == told["from_elsewhere"] == "length"
    assert told["completion"] != ""


@pytest.fixture(scope="module")
def told(tools_server: Server, scripted_server: Server, environment: Path) -> Any:
    session = HERE / "langchain_tools_session.py"
    return told_by(environment / "python", session, tools_server, scripted_server)


def test_a_bound_tool_is_called_and_its_result_answered(told: Any) -> None:
    chosen = told["chosen"]
    assert chosen["calls"] == chosen["streamed_calls"] == [{"name": "multiply", "args": {"a": 6, "b": 7}}]
    assert (chosen["invalid"], chosen["finish"]) == ([], "tool_calls")
    assert (chosen["results"], chosen["last"]) == (["42"], "It is 42.")
    assert [text.strip() for text in chosen["text"]] == ["Let me see.", "Let me see."]


def test_a_tool_that_must_be_called_is_called(told: Any) -> None:
    assert set(told["enforced"]["bind_any"]) <= {"multiply", "pick"}
    assert told["enforced"]["bind_any"] != []
    assert set(told["enforced"]["bind_pick"]) == {"pick"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_of_the_class_whole_and_streamed(told: Any, method: str) -> None:
    item = told["enforced"][method]
    assert item == told["enforced"][f"{method}_stream"]
    assert item["color"] in COLORS
    assert 0 <= item["count"] <= 99


def test_json_mode_and_plain_schemas_are_read(told: Any) -> None:
    assert told["json_mode"] == {"color": "red", "count": 3}
    assert told["enforced"]["dict"]["color"] in COLORS
    assert told["enforced"]["raw_error"] is None
