"""Fields without effect: they pass and are told in a header and once in the log; misspelt names of served
fields are refused."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any, get_args

import httpx
import msgspec
import pytest
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.app import create_app
from headway.server.base.config import ServiceLimits
from headway.server.http.keys import Keys
from headway.server.protocol import decoding
from headway.server.protocol.chat import ChatRequest, Message
from headway.server.protocol.completions import CompletionRequest
from headway.server.protocol.decoding import is_slip
from headway.server.protocol.messages_api import MessagesRequest
from headway.server.protocol.responses_api import ResponsesRequest
from headway.server.protocol.tokens import TokenizeRequest
from headway.server.protocol.tools import FunctionDefinition
from headway.server.requests.body import MAX_LOGGED, THREAD_BYTES
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

HELLO = {"role": "user", "content": "hello"}
COMPLETIONS, CHATS, RESPONSES, MESSAGES, TOKENIZE = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize",
)  # fmt: skip
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 2},
    CHATS: {"messages": [HELLO], "max_tokens": 2},
    RESPONSES: {"input": "hello", "max_output_tokens": 2},
    MESSAGES: {"messages": [HELLO], "max_tokens": 2},
    TOKENIZE: {"messages": [HELLO]},
}
GENERATING = tuple(path for path in LEAST if path != TOKENIZE)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, RoleLines(), keys=Keys((), "boss"))


def told(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [path for path in response.headers.get("x-headway-ignored", "").split(", ") if path]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return {"param": error["param"], "code": error["code"], "message": error["message"]} if "param" in error else {
        "param": error["details"]["param"], "code": error["details"]["error_code"], "message": error["message"]}  # fmt: skip


@pytest.mark.parametrize("path", LEAST)
async def test_an_unknown_field_passes_and_is_told(client: httpx.AsyncClient, path: str) -> None:
    unknown = {
        "intent": "chat",
        "zdr": True,
        "include_usage": 0,
        "xqzv" * 100: 1,
        "no name": 1,
        "empty": "",
        "none": None,
        "bare": {},
    }
    assert told(await client.post(path, json={**LEAST[path], **unknown})) == [
        "intent",
        "zdr",
        "include_usage",
        ("xqzv" * 100)[:64],
    ]
    assert told(await client.post(path, json=LEAST[path])) == []


async def test_an_unknown_field_of_the_limit_of_drafts_passes_beside_null(client: httpx.AsyncClient) -> None:
    boss = {"Authorization": "Bearer boss"}
    body = {"max_draft_tokens": None, "reason": "a test"}
    assert told(await client.put("/v1/speculation", json=body, headers=boss)) == ["reason"]
    assert (
        error_of(await client.put("/v1/speculation", json={"reason": "a test"}, headers=boss))["param"]
        == "max_draft_tokens"
    )


NESTED: list[tuple[str, dict[str, Any], str]] = [
    (CHATS, {"messages": [{**HELLO, "mood": 1}, {**HELLO, "mood": 1}]}, "messages[0].mood"),
    (CHATS, {"messages": [HELLO, {"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}]}, "messages[1].content[0].mood"),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "mood": 1}]}, HELLO]}, "messages[0].tool_calls[0].mood"),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "mood": 1}}]}, HELLO]},
     "messages[0].tool_calls[0].function.mood"),
    (CHATS, {"tools": [{**TOOL, "mood": 1}], "tool_choice": "none"}, "tools[0].mood"),
    (CHATS, {"tools": [{"type": "function", "function": {**FUNCTION, "mood": 1}}], "tool_choice": "none"}, "tools[0].function.mood"),
    (CHATS, {"response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
    (CHATS, {"stream": True, "stream_options": {"mood": 1}}, "stream_options.mood"),
    (COMPLETIONS, {"speculation": {"mood": 1}}, "speculation.mood"),
    (COMPLETIONS, {"structured_outputs": {"mood": 1}}, "structured_outputs.mood"),
    (RESPONSES, {"text": {"mood": 1}}, "text.mood"),
    (RESPONSES, {"text": {"format": {"type": "text", "mood": 1}}}, "text.format.mood"),
    (RESPONSES, {"reasoning": {"mood": 1}}, "reasoning.mood"),
    (MESSAGES, {"thinking": {"type": "disabled", "mood": 1}}, "thinking.mood"),
    (MESSAGES, {"output_config": {"mood": 1}}, "output_config.mood"),
    (MESSAGES, {"messages": [{**HELLO, "mood": 1}]}, "messages[0].mood"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}]}, "messages[0].content[0].mood"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}, "mood": 1}], "tool_choice": {"type": "none"}}, "tools[0].mood"),
    (TOKENIZE, {"messages": [{**HELLO, "mood": 1}]}, "messages[0].mood"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), NESTED, ids=[f"{p}-{e}" for p, _, e in NESTED])
async def test_an_unknown_field_passes_at_every_level_and_is_told_once(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], expected: str
) -> None:
    assert told(await client.post(path, json={**LEAST[path], **body})) == [expected]


async def test_a_large_body_passes_with_unknown_fields_in_every_part(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MAX_UNKNOWN", 3)
    thoughts = [{"type": "thinking", "text": "hm", "mood": i} for i in range(7000)]
    messages = [HELLO, {"role": "assistant", "content": thoughts}, HELLO]
    body = {**LEAST[CHATS], "messages": messages, "a1": 1, "a2": 2, "a3": 3}
    assert len(json.dumps(body)) > THREAD_BYTES
    assert told(await client.post(CHATS, json=body)) == ["messages[1].content[0].mood", "a1", "a2"]


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("name", "value"),
    [("service_tier", "flex"), ("verbosity", "low"), ("prediction", {"type": "content", "content": "x"}), ("store", True),
     ("guided_decoding_backend", "guidance"), ("moderation", {"model": "m"}), ("num_ctx", 4096), ("cache_prompt", False),
     ("kv_transfer_params", {"do_remote_decode": True}), ("timings_per_token", True), ("models", ["a", "b"]), ("mode", "chat")],
)  # fmt: skip
async def test_a_hint_that_changes_no_token_passes_in_every_api(
    client: httpx.AsyncClient, path: str, name: str, value: object
) -> None:
    assert told(await client.post(path, json={**LEAST[path], name: value})) == [name]


@pytest.mark.parametrize(
    ("path", "body"),
    [(p, {"service_tier": "auto", "verbosity": "medium", "speed": "standard", "cache_prompt": True}) for p in GENERATING]
    + [(RESPONSES, {"text": {"verbosity": "medium"}, "store": False}), (CHATS, {"store": False}), (CHATS, {"reasoning_effort": "none"})],
)  # fmt: skip
async def test_a_hint_that_asks_for_nothing_is_not_told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    assert told(await client.post(path, json={**LEAST[path], **body})) == []


EFFORTS: list[tuple[str, dict[str, Any], list[str]]] = [
    (CHATS, {"reasoning_effort": "medium"}, ["reasoning_effort"]),
    (RESPONSES, {"reasoning": {"effort": "high"}}, ["reasoning.effort"]),
    (RESPONSES, {"reasoning_effort": "high"}, ["reasoning.effort"]),
    (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (MESSAGES, {"output_config": {"effort": "low"}}, ["output_config.effort"]),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["thinking"]),
    (MESSAGES, {"thinking": {"type": "disabled"}}, []),
    (TOKENIZE, {"reasoning_effort": "low"}, ["reasoning_effort"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "expected"), EFFORTS)
async def test_an_effort_is_accepted_by_a_model_without_reasoning_and_told(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], expected: list[str]
) -> None:
    assert told(await client.post(path, json={**LEAST[path], **body})) == expected


@pytest.mark.parametrize("path", [RESPONSES, CHATS])
async def test_a_stream_tells_what_is_ignored(client: httpx.AsyncClient, path: str) -> None:
    body = {**LEAST[path], "stream": True, "service_tier": "flex", "reasoning_effort": "low"}
    effort = "reasoning.effort" if path == RESPONSES else "reasoning_effort"
    assert told(await client.post(path, json=body)) == ["service_tier", effort]


async def test_the_log_tells_each_ignored_name_once_and_not_without_end(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway.server")
    for _ in range(2):
        await client.post(
            CHATS, json={**LEAST[CHATS], "intent": 1, "messages": [HELLO, {**HELLO, "mood": 1}]}
        )
    messages = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [message.split()[2] for message in messages] == ["messages[1].mood", "intent"]
    caplog.clear()
    await client.post(COMPLETIONS, json=LEAST[COMPLETIONS] | {f"unheard_of_{i}": 1 for i in range(1000)})
    assert len([r for r in caplog.records if "has no effect" in r.getMessage()]) == MAX_LOGGED - 2


def slips(name: str) -> list[str]:
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return [name[:middle] + name[middle + 1 :], name[:middle] + "x" + name[middle:], name[:middle] + "X" + name[middle + 1 :],
            name + "s", name[1:], *([swapped] if swapped != name else [])]  # fmt: skip


def levels(kind: type[msgspec.Struct], where: str = "") -> dict[str, type[msgspec.Struct]]:
    """The kinds of objects within a body by their paths, lists left out."""
    found = {where: kind}
    for field in msgspec.structs.fields(kind):
        for inner in get_args(field.type):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                found |= levels(inner, f"{where}{field.name}.")
    return found


KINDS: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionRequest, CHATS: ChatRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest, TOKENIZE: TokenizeRequest,
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
async def test_a_misspelt_name_of_a_served_field_is_refused_with_the_right_name(
    client: httpx.AsyncClient, path: str
) -> None:
    """At every level of objects in objects: each field with a letter less, more, different, or two
    swapped."""
    num_tried = 0
    for where, kind in levels(KINDS[path]).items():
        names = [field.encode_name for field in msgspec.structs.fields(kind)]
        known = {*names, *getattr(kind, "unserved", {}), *getattr(kind, "other_names", {})}
        for name in names:
            for slip in set(slips(name)) - known:
                inner: dict[str, Any] = {slip: 1}
                for part in reversed(where.split(".")[:-1]):
                    inner = {part: inner}
                error = error_of(await client.post(path, json={**LEAST[path], **inner}))
                assert (error["param"], error["code"]) == (where + slip, "unknown_parameter")
                meant = error["message"].partition("did you mean ")[2].removesuffix("?")
                assert meant.startswith(where)
                assert is_slip(slip, meant.removeprefix(where))
                num_tried += 1
    assert num_tried > 30


@pytest.mark.parametrize(
    ("path", "body", "param", "meant"),
    [
        (CHATS, {"temprature": 1}, "temprature", "temperature"), (CHATS, {"max_token": 5}, "max_token", "max_tokens"),
        (CHATS, {"n_predcit": 5}, "n_predcit", "n_predict"), (CHATS, {"Temperature": 1}, "Temperature", "temperature"),
        (CHATS, {"messages": [HELLO, {"role": "user", "contnt": "x"}]}, "messages[1].contnt", "messages[1].content"),
        (CHATS, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "argumnets": "{}"}}]}]},
         "messages[0].tool_calls[0].function.argumnets", "messages[0].tool_calls[0].function.arguments"),
        (CHATS, {"tools": [{"type": "function", "function": {"name": "f", "descripton": "x"}}]}, "tools[0].function.descripton",
         "tools[0].function.description"),
        (CHATS, {"tool_choice": {"type": "function", "functon": {"name": "f"}}}, "tool_choice.functon", "tool_choice.function"),
        (CHATS, {"response_format": {**SCHEMA, "json_schema": {**SCHEMA["json_schema"], "strcit": True}}},  # type: ignore[dict-item]
         "response_format.json_schema.strcit", "response_format.json_schema.strict"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "paramters": {}}]}, "tools[0].paramters", "tools[0].parameters"),
        (MESSAGES, {"tools": [{"name": "f", "input_schma": {}}]}, "tools[0].input_schma", "tools[0].input_schema"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "contnet": "x"}]}]},
         "messages[0].content[0].contnet", "messages[0].content[0].content"),
    ],
)  # fmt: skip
async def test_a_misspelt_name_within_lists_is_refused_with_the_right_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, meant: str
) -> None:
    error = error_of(await client.post(path, json={**LEAST[path], **body}))
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert error["message"] == f"Unrecognized request argument supplied: {param}; did you mean {meant}?"


@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, Message, FunctionDefinition]
)
def test_no_known_field_is_a_misspelt_one(kind: type[msgspec.Struct]) -> None:
    """What clients of OpenRouter and others send is one letter away from served names: those are known."""
    for name in ("models", "mode", "speed", "top_a", "route", "provider"):
        served = {field.encode_name for field in msgspec.structs.fields(kind)}
        known = {*getattr(kind, "unserved", {}), *served}
        assert name in known or not any(is_slip(name, other) for other in served), name


@pytest.fixture
async def strict(services: Services) -> httpx.AsyncClient:
    limits = ServiceLimits(refuses_unknown_fields=True)
    transport = httpx.ASGITransport(create_app(dataclasses.replace(services, limits=limits)))
    return httpx.AsyncClient(transport=transport, base_url="http://headway")


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"maxTokens": 5}, "maxTokens", "did you mean max_tokens?"), ({"guided_jsn": {}}, "guided_jsn", "did you mean guided_json?"),
        ({"speculation": {"max_drafted_tokens": 1}}, "speculation.max_drafted_tokens", "did you mean speculation.max_draft_tokens?"),
        ({"transform": 1}, "transform", "did you mean transforms?"), ({"intent": "chat"}, "intent", "/docs/api.md lists the known ones"),
        ({"include_usage": True}, "include_usage", "/docs/api.md lists the known ones"),
        ({"xqzv" * 100: 1}, ("xqzv" * 100)[:64], "/docs/api.md lists the known ones"),
    ],
)  # fmt: skip
async def test_a_server_may_refuse_unknown_fields_with_a_near_name_of_the_same_level(
    strict: httpx.AsyncClient, body: dict[str, Any], param: str, hint: str
) -> None:
    error = error_of(await strict.post(CHATS, json={**LEAST[CHATS], **body}))
    assert error == {
        "param": param,
        "code": "unknown_parameter",
        "message": f"Unrecognized request argument supplied: {param}; {hint}",
    }


async def test_a_server_that_refuses_unknown_fields_takes_known_ones(strict: httpx.AsyncClient) -> None:
    part = {"type": "text", "text": "hello", "unheard_of": 1}
    body = {
        "service_tier": "flex",
        "user": "u",
        "unheard_of": None,
        "messages": [{"role": "user", "content": [part]}],
    }
    assert told(await strict.post(CHATS, json={**LEAST[CHATS], **body})) == [
        "messages[0].content[0].unheard_of",
        "service_tier",
        "user",
    ]
