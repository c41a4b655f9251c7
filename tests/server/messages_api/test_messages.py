"""Answers of Anthropic's Messages API over a FakeEngine that writes given texts: blocks, events, endings,
wishes about thinking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.messages import (
    COUNT,
    HELLO,
    URL,
    asked,
    comparable,
    connect,
    events_of,
    message_of,
)
from headway_testing.tiny_tokenizers import save_with_delimiters

from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {"a": {}}}}
    for name in ("read_config", "close")
]
TEMPLATE = "<tool_call></think>{{ enable_thinking }}"
THOUGHT = "<think>\nthe quick 日本語 fox\n</think>\n\n"
FIRST = '<tool_call>\n{"name": "read_config", "arguments": {"a": "é😀"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
TEXTS = {
    "thought-and-text": THOUGHT + "the lazy\u2028dog",
    "thought-text-calls": THOUGHT + "the lazy dog\n" + FIRST + SECOND,
    "calls-alone": FIRST + SECOND,
    "a-call-that-does-not-end": THOUGHT + "the dog " + FIRST[:-20],
    "text-alone": "the lazy dog",
    "thought-alone": "<think>the quick",
    "nothing": "",
}  # fmt: skip


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_with_delimiters(tmp_path_factory.mktemp("messages"), "added"))


@pytest.fixture
def chat() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, chat: RecordingChat, grammars: Grammars) -> Services:
    return fake_services(engine, tokenizer, chat, template=TEMPLATE, grammars=grammars)


async def whole(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(f"{URL}?beta=true", json=asked(**{"tools": TOOLS, **body}))
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json=asked(stream=True, **{"tools": TOOLS, **body}))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    return events_of(response.text)


async def test_an_answer_has_the_shape_of_anthropic(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    ids = write(TEXTS["thought-text-calls"])
    engine.num_cached = lambda request: 4
    answer = await whole(client)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    thought, text, first, second = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "the quick 日本語 fox")
    assert thought["signature"]
    assert text == {"type": "text", "text": "the lazy dog"}
    assert first["id"] != second["id"]
    assert first["id"].startswith("toolu_")
    assert {**first, "id": 0} == {"type": "tool_use", "id": 0, "name": "read_config", "input": {"a": "é😀"}}
    assert {**second, "id": 0} == {"type": "tool_use", "id": 0, "name": "close", "input": {}}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + 4 == len(engine.submitted[0].prompt_token_ids)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (4, 0)
    assert usage["output_tokens"] == len(ids)
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < len(ids)


@pytest.mark.parametrize("name", TEXTS)
async def test_a_stream_of_messages_says_the_same_however_it_is_cut(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]], name: str
) -> None:
    ids = write(TEXTS[name])
    expected = comparable(await whole(client))
    for engine.tokens_per_round in (1, 2, 3, 5, 7, len(ids)):
        assert comparable(await whole(client)) == expected
        events = await streamed(client)
        assert comparable(message_of(events)) == expected
    assert events[0]["message"]["usage"]["input_tokens"] == expected["usage"]["input_tokens"]


async def test_a_block_is_one_event_after_the_other_as_it_comes(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    write(THOUGHT + "dog" + FIRST)
    engine.tokens_per_round = 1000
    told = [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in await streamed(client)]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert told == [
        ("message_start", None, None),
        (start, 0, None), (delta, 0, "thinking_delta"), (delta, 0, "signature_delta"), (stop, 0, None),
        (start, 1, None), (delta, 1, "text_delta"), (stop, 1, None),
        (start, 2, None), (delta, 2, "input_json_delta"), (stop, 2, None),
        ("message_delta", None, None), ("message_stop", None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("thinking", ["disabled", "omitted"])
async def test_thinking_that_is_not_wanted_is_left_out_or_empty(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], thinking: str
) -> None:
    write(TEXTS["thought-and-text"])
    kind = {"type": "disabled"} if thinking == "disabled" else {"type": "adaptive", "display": "omitted"}
    answer = await whole(client, thinking=kind)
    assert comparable(message_of(await streamed(client, thinking=kind))) == comparable(answer)
    *thoughts, text = answer["content"]
    assert text["type"] == "text"
    assert [thought["thinking"] for thought in thoughts] == ([] if thinking == "disabled" else [""])


async def test_wishes_about_thinking_reach_template_and_engine(
    client: httpx.AsyncClient, engine: FakeEngine, chat: RecordingChat, tokenizer: Tokenizer
) -> None:
    await whole(client, thinking={"type": "enabled", "budget_tokens": 20})
    assert chat.seen[-1].template_variables == {"enable_thinking": True}
    budget = engine.submitted[-1].sampling.thinking_budget
    assert budget is not None
    assert (budget.num_tokens, budget.end_id) == (21, tokenizer.token_id("</think>"))
    await whole(client, thinking={"type": "disabled"})
    assert chat.seen[-1].template_variables == {"enable_thinking": False}


ENDINGS: list[tuple[dict[str, Any], tuple[str, str | None], str]] = [
    ({}, ("end_turn", None), "the lazy dog"),
    ({"stop_sequences": ["x", "lazy"]}, ("stop_sequence", "lazy"), "the "),
    ({"max_tokens": 2}, ("max_tokens", None), ""),
]


@pytest.mark.parametrize(("body", "ending", "text"), ENDINGS, ids=["end", "stop", "length"])
async def test_the_reason_of_the_end_is_named(
    client: httpx.AsyncClient,
    write: Callable[[str], list[int]],
    body: dict[str, Any],
    ending: tuple[str, str | None],
    text: str,
) -> None:
    write(TEXTS["text-alone"])
    answer = await whole(client, **body)
    assert comparable(message_of(await streamed(client, **body))) == comparable(answer)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ending
    said = "".join(block["text"] for block in answer["content"])
    assert said == text or (ending[0] == "max_tokens" and "the lazy dog".startswith(said))


async def test_a_stop_string_of_the_template_is_the_models_own_end(
    services: Services, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["text-alone"])
    async with connect(services, chat_stop_strings=("dog",)) as client:
        answer = await whole(client)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


async def test_max_tokens_may_be_more_than_the_context_has_room_for(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """As Claude Code asks for 32,000 tokens whatever the context; the ending tells which limit it was."""
    answer = await whole(client, max_tokens=32_000)
    used = len(engine.submitted[0].prompt_token_ids) + answer["usage"]["output_tokens"]
    assert (answer["stop_reason"], used) == ("model_context_window_exceeded", INFO.max_model_len)
    room = answer["usage"]["output_tokens"]
    assert (await whole(client, max_tokens=room))["stop_reason"] == "max_tokens"


async def test_a_count_is_that_of_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {
        "model": "tiny",
        "messages": [HELLO],
        "tools": TOOLS,
        "system": "s",
        "thinking": {"type": "enabled", "budget_tokens": 9},
    }
    await whole(client, **body)
    response = await client.post(f"{COUNT}?beta=true", json=body)
    assert response.json() == {"input_tokens": len(engine.submitted[0].prompt_token_ids)}


async def test_messages_are_counted_and_logged_as_chats_are(
    client: httpx.AsyncClient,
    services: Services,
    caplog: pytest.LogCaptureFixture,
    write: Callable[[str], list[int]],
) -> None:
    ids = write(TEXTS["calls-alone"])
    with caplog.at_level("INFO", logger="headway.access"):
        await whole(client)
    (record,) = [r for r in caplog.records if r.name == "headway.access"]
    fields: dict[str, Any] = record.fields  # type: ignore[attr-defined]
    assert (fields["path"], fields["status"], fields["completion_tokens"]) == (URL, 200, len(ids))
    assert fields["finish_reasons"] == ["tool_calls"]
    lines = services.metrics.text().decode().splitlines()
    assert 'headway_http_responses_total{endpoint="messages",status="200"} 1.0' in lines


async def test_keywords_that_are_not_enforced_are_told_by_the_paths_of_the_request(
    client: httpx.AsyncClient,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "format": "bigint"}}}
    tool = {"name": "f", "input_schema": schema}
    for body, path in (
        ({"tools": [tool], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
    ):
        response = await client.post(URL, json=asked(**body))
        assert response.status_code == 200, response.text
        assert response.headers["x-headway-ignored"] == f"{path}.properties.a.format"
