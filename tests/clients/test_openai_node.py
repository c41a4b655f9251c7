"""The official JavaScript client under Node."""

from __future__ import annotations

from pathlib import Path

from headway_testing.client_session import told_by
from headway_testing.daemon import Server
from headway_testing.tools import installed


def test_the_javascript_client_works_from_completions_to_errors(chat_server: Server) -> None:
    session = Path(__file__).parent / "openai_session.mjs"
    told = told_by(installed("node"), session, chat_server)
    assert told["streamed"] == told["completion"] != ""
    assert told["streamedUsage"]["completion_tokens"] == told["usage"]["completion_tokens"] == 24
    assert told["chatStreamed"] == told["chat"] == "".join(told["tokens"]) != ""
    assert told["history"] == "length"
    assert told["left"] == "text_completion"
    name, status, message = told["error"]
    assert (name, status) == ("BadRequestError", 400)
    assert "temperature is 3" in message
    chat_server.wait_until_idle()


def test_its_helpers_parse_objects_and_run_tools(tools_server: Server, scripted_server: Server) -> None:
    session = Path(__file__).parent / "openai_tools_session.mjs"
    told = told_by(installed("node"), session, tools_server, scripted_server)
    assert told["parsed"] == told["streamed"]
    for item in (told["parsed"], *told["required"]):
        assert item["color"] in ("red", "green", "blue")
        assert 0 <= item["count"] <= 99
    assert len(told["required"]) == 1
    assert told["run whole"] == told["run streamed"] == {"text": "It is 42.", "results": [42]}
