"""Ids of calls for templates that take none but those of a length: of answers, and of the conversations that
follow them."""

from __future__ import annotations

import re
from random import SystemRandom
from typing import Any

import httpx
import pytest
from headway_testing import chat_templates, tiny_tokenizers
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.in_process_chat import InProcessChat
from msgspec.structs import replace

from headway.server.formats.call_ids import new_call_id
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": "weather"}},
    {"type": "function", "function": {"name": "time"}},
]
ASKED = {"role": "user", "content": "Weather and time?"}
CALLS = '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "time", "arguments": {}}]'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("mistral")
    return load_tokenizer(tiny_tokenizers.save(folder, chat_templates.byte_level()))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(replace(INFO, max_model_len=4096))


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    source = chat_templates.MISTRAL
    chat = InProcessChat(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return fake_services(engine, tokenizer, chat, template=source)


async def answer(client: httpx.AsyncClient, *messages: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": [ASKED, *messages], "tools": TOOLS})
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def ids_seen(engine: FakeEngine, tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """The ids of the calls and of the results in the last prompt."""
    prompt = tokenizer.full_vocabulary.decode(engine.submitted[-1].prompt_token_ids)
    return re.findall('"id": "([^"]*)"', prompt), re.findall('"call_id": "([^"]*)"', prompt)


def saying(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> None:
    ids = [*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]]
    engine.script = lambda request: ids


async def test_a_conversation_goes_on_after_calls_of_its_own(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    saying(engine, tokenizer, CALLS)
    called = await answer(client)
    ids = [call["id"] for call in called["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": one, "content": "ok"} for one in ids]
    saying(engine, tokenizer, "done")
    assert (await answer(client, called, *results))["content"] == "done"
    assert ids_seen(engine, tokenizer) == (ids, ids)


def call(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": "{}"}, **fields}


@pytest.mark.parametrize(
    ("ids", "result_ids"),
    [
        (["call_1", "call_2"], ["call_1", "call_2"]),
        (["call_1", "call_2"], ["call_2", "call_1"]),
        (["toolu_01abcdefgh", "a1B2c3D4e"], ["toolu_01abcdefgh", "a1B2c3D4e"]),
        ([None, None], [None, None]),
        (["call_1", "call_2"], [None, None]),
    ],
)
async def test_a_conversation_begun_elsewhere_has_an_id_for_each_call_and_its_result(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    ids: list[str | None],
    result_ids: list[str | None],
) -> None:
    saying(engine, tokenizer, "done")
    calls = [call(id=one) for one in ids]
    results = [{"role": "tool", "tool_call_id": one, "content": "ok"} for one in result_ids]
    await answer(client, {"role": "assistant", "content": None, "tool_calls": calls}, *results)
    seen, seen_results = ids_seen(engine, tokenizer)
    assert len(set(seen)) == 2
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", one) for one in seen)
    assert seen_results == (seen if result_ids != ids[::-1] or None in ids else seen[::-1])
    assert [one for one in ids if one == "a1B2c3D4e"] == [one for one in seen if one == "a1B2c3D4e"]


async def test_function_calls_of_old_have_ids_too(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    saying(engine, tokenizer, "done")
    old = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    result = {"role": "function", "name": "weather", "content": "ok"}
    await answer(client, old, result, old, result)
    seen, seen_results = ids_seen(engine, tokenizer)
    assert seen == seen_results
    assert len(set(seen)) == 2


def test_new_ids_differ_and_have_the_form() -> None:
    assert re.fullmatch("call_[0-9a-f]{24}", new_call_id(None, SystemRandom()))
    ids = {new_call_id(9, SystemRandom()) for _ in range(1000)}
    assert len(ids) == 1000
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", one) for one in ids)
