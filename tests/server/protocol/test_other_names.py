"""Names that other servers have for fields which are served here."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.protocol import other_names
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.completions import CompletionRequest
from headway.server.protocol.decoding import decode
from headway.server.protocol.messages_api import MessagesRequest
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.responses_api import ResponsesRequest
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "hello"}
KINDS = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)
VALUES: dict[str, tuple[object, object]] = {
    "repetition_penalty": (1.5, 1.25), "seed": (7, 8), "min_tokens": (1, 2), "stop": (["a"], ["b"]), "include_stop_str_in_output": (True, False),
    "ignore_eos": (True, False), "cache_salt": ("a", "b"), "max_tokens": (5, 6), "max_output_tokens": (5, 6), "thinking_budget_tokens": (-1, 5),
    "stop_sequences": (["a"], ["b"]),
}  # fmt: skip
LEAST: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": "hello"}, ChatRequest: {"messages": [HELLO]}, ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": [HELLO]},
}  # fmt: skip
PATHS = {
    CompletionRequest: "/v1/completions", ChatRequest: "/v1/chat/completions", ResponsesRequest: "/v1/responses",
    MessagesRequest: "/v1/messages",
}  # fmt: skip
CASES = [(kind, name, own) for kind in KINDS for name, own in kind.other_names.items()]


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, RoleLines())


@pytest.mark.parametrize(("kind", "name", "own"), CASES, ids=[f"{k.__name__}-{n}" for k, n, _ in CASES])
async def test_another_name_is_the_field(
    client: httpx.AsyncClient, kind: type[Any], name: str, own: str
) -> None:
    """Alone, and beside the field with an equal value; refused by both names beside another value."""
    value, other = VALUES[own]
    least = LEAST[kind] | ({"max_tokens": 5} if kind is MessagesRequest and own != "max_tokens" else {})
    path = PATHS[kind]
    body = decode(httpx.Request("POST", "http://x", json={**least, name: value}).content, kind)
    assert getattr(body, own) == value
    for names in ((name,), (name, own)):
        response = await client.post(path, json={**least, **dict.fromkeys(names, value)})
        assert response.status_code == 200 or own == "thinking_budget_tokens", response.text
        assert "x-headway-ignored" not in response.headers
    response = await client.post(path, json={**least, name: value, own: other})
    assert response.status_code == 400
    assert all(part in response.text for part in (name, own, "two names of one field", "send one of them"))


@pytest.mark.parametrize(
    "table", [other_names.COMPLETIONS, other_names.CHAT, other_names.RESPONSES, other_names.MESSAGES]
)
def test_no_field_has_the_name_of_another(table: OtherNames) -> None:
    kind = next(kind for kind in KINDS if kind.other_names is table)
    assert set(table.values()) <= set(kind.__struct_fields__)
    assert not set(table) & ({*kind.__struct_fields__} | {*kind.unserved})


async def test_two_other_names_are_told_as_the_client_wrote_them(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hello", "n_predict": 5, "max_new_tokens": 6}
    error = (await client.post("/v1/completions", json=body)).json()["error"]
    assert (
        error["message"]
        == "max_new_tokens is 6 and n_predict is 5: they are two names of one field; send one of them"
    )
    assert error["param"] == "max_new_tokens"


async def test_a_stop_by_another_name_may_be_a_text_or_a_list(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": "hello", "stop": "a", "stop_sequences": ["a"], "n_predict": -1, "repeat_penalty": 1.5}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert engine.submitted[0].sampling.repetition_penalty == 1.5
