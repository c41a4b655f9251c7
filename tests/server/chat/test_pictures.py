"""Pictures and other parts that are no text: a line takes their place in a history, and only the question
itself may have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

LINE = "[image not shown: this model reads text]"
DATA = "data:image/png;base64,iVBORw0KGgo="
IMAGE: dict[str, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"url": DATA}},
    "responses": {"type": "input_image", "image_url": DATA, "detail": "auto"},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
}  # fmt: skip
FILE: dict[str, dict[str, Any]] = {
    "chat": {"type": "file", "file": {"file_data": "JVBERi0="}},
    "responses": {"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="},
    "messages": {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
}  # fmt: skip
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def text(api: str, value: str) -> dict[str, Any]:
    return {"type": "input_text" if api == "responses" else "text", "text": value}


def body(api: str, **parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A question, an answer, a question, a call, its result and, if there is one, a last question. parts: of
    their contents, by name."""
    first, result, last = (
        parts.get("first", [text(api, "q1")]),
        parts.get("result", [text(api, "r")]),
        parts.get("last"),
    )
    if api == "messages":
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": [text(api, "a1")]},
            {"role": "user", "content": "q2"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
            *([{"role": "assistant", "content": "a2"}, {"role": "user", "content": last}] if last else []),
        ]
        return {"messages": turns, "max_tokens": 2}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "q2"},
    ]
    later = [{"role": "assistant", "content": "a2"}, {"role": "user", "content": last}] if last else []
    if api == "responses":
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        return {
            "input": [*said, call, {"type": "function_call_output", "call_id": "c", "output": result}, *later]
        }
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"messages": [*said, {"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": "c", "content": result}, *later]}  # fmt: skip


@pytest.fixture
def recorded() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, recorded: RecordingChat) -> Services:
    return fake_services(engine, tokenizer, recorded)


PLACES: dict[str, tuple[Callable[[str], dict[str, Any]], int, str, dict[str, str]]] = {
    "result": (lambda api: body(api, result=[text(api, "r"), IMAGE[api]]), 4, f"r\n{LINE}",
        {"chat": "messages[4].content[1]", "responses": "input[4].output[1]", "messages": "messages[4].content[0].content[1]"}),
    "result-of-a-picture-alone": (lambda api: body(api, result=[IMAGE[api]], last=[text(api, "and?")]), 4, LINE,
        {"chat": "messages[4].content[0]", "responses": "input[4].output[0]", "messages": "messages[4].content[0].content[0]"}),
    "earlier-question": (lambda api: body(api, first=[IMAGE[api], text(api, "q1")]), 0, f"{LINE}\nq1",
        {"chat": "messages[0].content[0]", "responses": "input[0].content[0]", "messages": "messages[0].content[0]"}),
    "earlier-file": (lambda api: body(api, first=[text(api, "q1"), FILE[api]], last=[text(api, "q3")]), 0, "q1\n[",
        {"chat": "messages[0].content[1]", "responses": "input[0].content[1]", "messages": "messages[0].content[1]"}),
}  # fmt: skip


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("place", PLACES)
async def test_a_line_takes_the_place_of_a_picture_in_a_history(
    client: httpx.AsyncClient, recorded: RecordingChat, place: str, api: str
) -> None:
    made, index, line, told = PLACES[place]
    answer = await client.post(PATHS[api], json=made(api))
    assert answer.status_code == 200, answer.text
    content = recorded.seen[-1].messages[index]["content"]
    assert content == line or (line.endswith("[") and content.startswith(line))
    assert answer.headers["x-headway-ignored"] == told[api]


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("kind", [IMAGE, FILE], ids=["image", "file"])
async def test_the_question_itself_may_have_no_picture(
    client: httpx.AsyncClient, kind: dict[str, dict[str, Any]], api: str
) -> None:
    asked = body(api, last=[text(api, "what is it?"), kind[api]])
    answer = await client.post(PATHS[api], json=asked)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "this model reads text" in message
    assert f"{'input' if api == 'responses' else 'messages'}[6].content[1].type is" in message
    # The advice: a text in its place; or going on after the refusal, when the picture is of an earlier turn.
    assert (await client.post(PATHS[api], json=body(api, last=[text(api, "what is it?")]))).status_code == 200
    name = "input" if api == "responses" else "messages"
    asked[name] += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "never mind"}]
    assert (await client.post(PATHS[api], json=asked)).status_code == 200


@pytest.mark.parametrize(
    ("api", "path"),
    [("messages", "/v1/messages/count_tokens"), ("chat", "/tokenize")],
    ids=["count", "tokenize"],
)
@pytest.mark.parametrize("place", PLACES)
async def test_who_counts_the_tokens_of_a_history_is_told_of_its_pictures(
    client: httpx.AsyncClient, place: str, api: str, path: str
) -> None:
    made, _, _, told = PLACES[place]
    asked = {name: value for name, value in made(api).items() if name != "max_tokens"}
    answer = await client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-headway-ignored"] == told[api]
