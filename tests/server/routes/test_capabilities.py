"""What GET /v1/models says of the model, in the words of other servers' clients."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pytest
from headway_testing.fake_chat import JoinedContents
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.messages import connect

from headway.server.formats import find_format
from headway.server.protocol.chat import ChatRequest
from headway.server.requests.services import Services

TEMPLATES = {
    "hermes": "<tool_call></think>{{ enable_thinking }}",
    "harmony": "<|channel|>{{ reasoning_effort }}",
    "plain": "{{ messages }}",
}


def chatting(services: Services, template: str) -> Services:
    return replace(
        services, chat=JoinedContents(), template_source=template, output_format=find_format(template)
    )


async def card(services: Services) -> dict[str, Any]:
    async with connect(services) as client:
        listed = (await client.get("/v1/models")).json()
    assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
        "list",
        False,
        "tiny",
        "tiny",
    )
    (only,) = listed["data"]
    return only  # type: ignore[no-any-return]


async def test_the_context_has_the_names_that_clients_look_for(
    services: Services, engine: FakeEngine
) -> None:
    told = await card(services)
    names = ("max_model_len", "context_length", "max_input_tokens", "max_tokens")
    assert [told[name] for name in names] == [INFO.max_model_len] * 4
    assert datetime.fromisoformat(told["created_at"]).timestamp() == told["created"]
    engine.info = None
    told = await card(services)
    assert [told[name] for name in names] == [None] * 4


@pytest.mark.parametrize(
    ("name", "tools", "thinking", "effort", "forms"),
    [("hermes", True, True, False, True), ("harmony", True, True, True, False), ("plain", False, False, False, True)],
)  # fmt: skip
async def test_capabilities_are_those_of_the_chat_template(
    services: Services, name: str, tools: bool, thinking: bool, effort: bool, forms: bool
) -> None:
    told = await card(chatting(services, TEMPLATES[name]))
    parameters, can = told["supported_parameters"], told["capabilities"]
    assert ("tools" in parameters) is tools
    assert ("include_reasoning" in parameters) is can["thinking"]["supported"] is thinking
    assert can["thinking"]["types"]["enabled"]["supported"] is thinking
    assert ("reasoning_effort" in parameters) is can["effort"]["supported"] is effort
    assert ("response_format" in parameters) is can["structured_outputs"]["supported"] is forms
    assert set(parameters) <= set(ChatRequest.__struct_fields__)


async def test_a_model_that_cannot_chat_calls_no_tools(services: Services) -> None:
    told = await card(replace(chatting(services, TEMPLATES["hermes"]), chat=None))
    assert "tools" not in told["supported_parameters"]
    assert not told["capabilities"]["thinking"]["supported"]


async def test_texts_that_mean_nothing_have_no_form(services: Services, engine: FakeEngine) -> None:
    engine.info = msgspec.structs.replace(INFO, synthetic_acceptance=(0.5,))
    assert "response_format" not in (await card(services))["supported_parameters"]
