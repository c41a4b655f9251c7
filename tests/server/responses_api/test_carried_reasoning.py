"""Reasoning that clients of /v1/responses carry from step to step, in the shapes that they send it back
in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.response_stream import events_of
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseReasoningItem, ResponseReasoningItemParam
from openai.types.responses.response_input_param import ResponseInputItemParam
from pydantic import TypeAdapter

from headway.server.base.errors import ApiError
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.responses_api.carried_reasoning import PREFIX, carried, carried_text
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/responses"
TEMPLATE = "<tool_call></think>"
THOUGHT = "the quick 日本語 fox"
SAID = (
    f'<think>\n{THOUGHT}\n</think>\n\nHm.\n<tool_call>\n{{"name": "look", "arguments": {{}}}}\n</tool_call>'
)
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ASKED = {"role": "user", "content": "a"}
INPUT: TypeAdapter[Any] = TypeAdapter(list[ResponseInputItemParam])


@pytest.fixture
def recorded() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
def services(
    engine: FakeEngine, tokenizer: Tokenizer, recorded: RecordingChat, grammars: Grammars
) -> Services:
    return fake_services(engine, tokenizer, recorded, template=TEMPLATE, grammars=grammars)


def as_codex(item: ResponseReasoningItem) -> dict[str, Any]:
    """Without its id; the text in clear only as far as it keeps that."""
    return {
        "type": "reasoning",
        "summary": [],
        "content": None,
        "encrypted_content": item.encrypted_content,
    }


def as_ai_sdk(item: ResponseReasoningItem) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": item.id,
        "summary": [],
        "encrypted_content": item.encrypted_content,
    }


def as_openai(item: ResponseReasoningItem) -> dict[str, Any]:
    """All of it."""
    return item.to_dict(mode="json")


@pytest.mark.parametrize("send_back", [as_codex, as_ai_sdk, as_openai])
@pytest.mark.parametrize("wish", [{"include": ["reasoning.encrypted_content"]}, {"store": False}], ids=str)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_reasoning_reaches_the_template_of_the_next_step(
    client: httpx.AsyncClient, recorded: RecordingChat, write: Callable[[str], list[int]],
    send_back: Callable[[ResponseReasoningItem], dict[str, Any]], wish: dict[str, Any], *, streams: bool,
) -> None:  # fmt: skip
    write(SAID)
    first = await client.post(URL, json={"input": [ASKED], "tools": [LOOK], "stream": streams, **wish})
    if streams:
        events = events_of(first.text)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        answer = Response.model_validate({**events[-1]["response"], "output": done}, strict=True)
    else:
        answer = Response.model_validate(first.json(), strict=True)
    thought, message, call = answer.output
    assert isinstance(thought, ResponseReasoningItem)
    items = [
        ASKED,
        send_back(thought),
        message.to_dict(mode="json"),
        call.to_dict(mode="json"),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    if send_back is not as_codex:  # whose shape OpenAI's types do not know
        INPUT.validate_python(items)
    again = await client.post(URL, json={"input": items, "tools": [LOOK], **wish})
    assert again.status_code == 200, again.text
    turn = recorded.seen[-1].messages[1]
    assert (turn["reasoning_content"], turn["content"]) == (THOUGHT, "Hm.")
    assert [one["function"]["name"] for one in turn["tool_calls"]] == ["look"]


async def test_who_neither_asks_nor_keeps_gets_it_once(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write(SAID)
    for body in ({}, {"store": True}, {"include": ["message.output_text.logprobs"]}):
        answer = (await client.post(URL, json={"input": [ASKED], "tools": [LOOK], **body})).json()
        thought = answer["output"][0]
        assert (thought["content"][0]["text"], thought["encrypted_content"]) == (THOUGHT, None)


async def test_it_comes_with_the_complete_item_alone(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write(SAID)
    body = {"input": [ASKED], "tools": [LOOK], "stream": True, "store": False}
    told = [event["item"] for event in events_of((await client.post(URL, json=body)).text) if "item" in event]
    thoughts = [(item["status"], item["encrypted_content"]) for item in told if item["type"] == "reasoning"]
    assert thoughts == [("in_progress", None), ("completed", carried(THOUGHT))]


async def test_reasoning_that_the_limit_cut_is_carried_as_far_as_it_came(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write(SAID)
    body = {"input": [ASKED], "store": False, "max_output_tokens": 9}
    (item,) = (await client.post(URL, json=body)).json()["output"]
    assert item["status"] == "incomplete"
    text = item["content"][0]["text"]
    assert THOUGHT.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert carried_text(item["encrypted_content"], "x") == text


async def test_the_official_client_carries_it(
    address: str, recorded: RecordingChat, write: Callable[[str], list[int]]
) -> None:
    write(SAID)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        first = await official.responses.create(
            model="tiny", input="a", store=False, include=["reasoning.encrypted_content"]
        )
        thought = first.output[0]
        assert isinstance(thought, ResponseReasoningItem)
        kept = ResponseReasoningItemParam(
            id=thought.id, summary=[], type="reasoning", encrypted_content=thought.encrypted_content
        )
        await official.responses.create(
            model="tiny", input=[{"role": "user", "content": "a"}, kept, {"role": "user", "content": "b"}]
        )
    assert recorded.seen[-1].messages[1]["reasoning_content"] == THOUGHT


@given(st.text())
def test_every_text_comes_back_as_it_was(text: str) -> None:
    value = carried(text)
    assert carried_text(value, "x") == text
    assert json.loads(json.dumps(value)) == value
    assert value.isascii()


@given(st.text(min_size=1), st.data())
def test_a_value_that_was_changed_is_refused(text: str, data: st.DataObject) -> None:
    value = carried(text)
    place = data.draw(st.integers(len(PREFIX), len(value) - 1))
    letter = data.draw(st.sampled_from("AZaz09-_=%é"))
    for changed in (value[:place], value[:place] + letter + value[place + 1 :]):
        found = text_or_error(changed)
        # The last letter may have bits that no byte has.
        assert found in (text, ("input[0].encrypted_content", "invalid_encrypted_content"))


def text_or_error(value: str) -> object:
    try:
        return carried_text(value, "input[0].encrypted_content")
    except ApiError as error:
        return error.param, error.code


@pytest.mark.parametrize("value", ["gAAAAABm", "", "headway-reasoning-2.AAAA"])
def test_a_value_of_another_server_is_none(value: str) -> None:
    assert carried_text(value, "x") is None
