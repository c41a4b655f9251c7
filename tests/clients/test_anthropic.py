"""Anthropic's official client: messages, streams, tools, thinking, counts, structured output, errors, the
list of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server

SESSION = Path(__file__).parent / "anthropic_session.py"
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]


@pytest.fixture(scope="module")
def told(tools_server: Server, scripted_server: Server, environment: Path) -> Any:
    return told_by(environment / "python", SESSION, tools_server, scripted_server)


def blocks(answer: Any) -> list[tuple[str, Any]]:
    names = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[names[block["type"]]]) for block in answer["content"]]


PARIS, ROME = {"city": "Paris", "days": 3}, {"city": "Rome", "days": 1}
ANSWERS: dict[str, tuple[list[tuple[str, Any]], str, str | None]] = {
    "text": ([("text", "Hello there.")], "end_turn", None),
    "calls": ([("text", "I look."), ("tool_use", PARIS), ("tool_use", ROME)], "tool_use", None),
    "one-call": ([("tool_use", PARIS)], "tool_use", None),
    "thinking": ([("thinking", "They ask for Paris."), ("text", "Paris.")], "end_turn", None),
    "omitted": ([("thinking", ""), ("text", "Paris.")], "end_turn", None),
    "stop": ([("text", "one ")], "stop_sequence", "two"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_whole_and_streamed_is_what_the_model_says(told: Any, name: str) -> None:
    answer = told["answers"][name]
    assert (blocks(answer), answer["stop_reason"], answer["stop_sequence"]) == ANSWERS[name]
    assert answer["events"][0] == "message_start"
    assert answer["events"][-2:] == ["message_delta", "message_stop"]
    assert answer["events"].count("content_block_start") == len(answer["content"])
    assert answer["prompt"] > 0
    assert answer["output_tokens"] > 0


def test_an_answer_at_the_limit_says_so(told: Any) -> None:
    assert told["answers"]["cut"]["stop_reason"] == "max_tokens"
    assert told["answers"]["cut"]["output_tokens"] == 2


def test_thinking_has_a_signature_and_a_count(told: Any) -> None:
    for name in ("thinking", "omitted"):
        answer = told["answers"][name]
        assert answer["content"][0]["signature"]
        assert 0 < answer["thinking_tokens"] < answer["output_tokens"]


def test_a_conversation_goes_on_with_thoughts_and_results(told: Any) -> None:
    conversation = told["conversation"]
    assert [kind for kind, _ in blocks(conversation["first"])] == ["thinking", "text", "tool_use"]
    assert blocks(conversation["last"]) == [("text", "It rains.")]
    assert conversation["counted"] == conversation["last"]["prompt"]


def test_the_clients_own_loop_runs_its_tool(told: Any) -> None:
    called, content = told["runner"]
    assert called == [["Paris", 3]]
    assert [block["text"] for block in content] == ["It rains."]


def test_what_claude_code_sends_is_served(told: Any) -> None:
    code = told["claude_code"]
    assert (code["stop_reason"], code["input"]) == ("tool_use", [PARIS])
    assert code["counted"] == code["prompt"]


@pytest.mark.parametrize(
    ("name", "raised", "kind", "code", "words"),
    [
        ("model", "NotFoundError", "not_found_error", "model_not_found", "'demo-tools'"),
        ("server-tool", "BadRequestError", "invalid_request_error", "unsupported_parameter", "tools[0].type is 'web_search_20250305'"),
        ("image", "BadRequestError", "invalid_request_error", "unsupported_content", "messages[0].content[0].type is 'image'"),
        ("long", "BadRequestError", "invalid_request_error", "context_length_exceeded", "prompt is too long"),
    ],
)  # fmt: skip
def test_errors_are_of_the_clients_classes(
    told: Any, name: str, raised: str, kind: str, code: str, words: str
) -> None:
    *found, message, has_id = told["errors"][name]
    assert (found, has_id) == ([raised, kind, code], True)
    assert words in message


def test_what_a_request_enforces_holds(told: Any) -> None:
    real = told["real"]
    assert real["parsed"] is True
    ((kind, given),) = blocks(real["any"])
    assert kind == "tool_use"
    assert set(given) in ({"city", "days"}, {"hour"})
    ((kind, given),) = blocks(real["named"])
    assert (kind, given["hour"] in (1, 2)) == ("tool_use", True)


def test_the_list_of_models_is_of_the_clients_type(told: Any) -> None:
    models = told["models"]
    assert (models["same"], models["id"], models["thinking"]) == (True, "demo-tools", True)
    assert models["max_input_tokens"] > 0
    assert set(models["extra"]) <= {"deprecated_at", "retires_at", "line"}
