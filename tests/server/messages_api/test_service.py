"""What surrounds an answer of Anthropic's Messages API: errors in its envelope, deadlines, pings, keys,
paths."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from headway_testing.fake_chat import JoinedContents
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.messages import COUNT, HELLO, URL, asked, connect, events_of
from headway_testing.waiting import until

from headway.engine import FinishReason, TokenEvent
from headway.server.base.config import ServiceLimits
from headway.server.http.keys import Keys
from headway.server.requests.services import Services


@pytest.fixture
def services(services: Services) -> Services:
    return replace(services, chat=JoinedContents())


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    envelope = response.json()
    assert set(envelope) == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    assert envelope["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return envelope["error"]


@pytest.mark.parametrize("url", [URL, COUNT])
async def test_refusals_have_the_envelope_of_anthropic(services: Services, url: str) -> None:
    async with connect(services, limits=ServiceLimits(max_body_bytes=2000), keys=Keys(("k",))) as client:
        error = error_of(await client.post(url, json={}), 401)
        assert (error["type"], error["details"]["error_code"]) == ("authentication_error", "invalid_api_key")
        assert "x-api-key" in error["message"]
        client.headers["x-api-key"] = "k"
        error = error_of(await client.post(url, content=b"{"), 400)
        assert (error["type"], error["details"]["error_code"]) == ("invalid_request_error", "invalid_json")
        error = error_of(await client.post(url, json={"messages": [HELLO] * 100}), 413)
        assert (error["type"], error["details"]["error_code"]) == ("invalid_request_error", "body_too_large")
        body = asked(model="claude-opus-4-8")
        if url == COUNT:
            del body["max_tokens"]
        error = error_of(await client.post(url, json=body), 404)
        assert (error["type"], error["details"]) == (
            "not_found_error",
            {"error_code": "model_not_found", "param": "model"},
        )
        assert "'tiny'" in error["message"]
        assert error_of(await client.get(url), 405)["type"] == "invalid_request_error"
        error = error_of(await client.post("/v1/messages/batches", json={}), 400)
        assert error["details"]["error_code"] == "unsupported_endpoint"


async def test_a_name_of_anthropics_may_be_served(services: Services) -> None:
    async with connect(services, other_names=("claude-opus-4-8",)) as client:
        answer = await client.post(URL, json=asked(model="claude-opus-4-8"))
    assert answer.json()["model"] == "tiny"


async def test_errors_name_the_fields_of_the_messages_api(client: httpx.AsyncClient) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"), ({"temperature": 3}, "temperature"), ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"messages": [HELLO, {"role": "user", "content": [{"type": "image"}]}]}, "messages[1].content[0].type"),
    ]  # fmt: skip
    for body, param in wrong:
        error = error_of(await client.post(URL, json=asked(**body)), 400)
        assert error["details"]["param"] == param, error
        assert error["message"].startswith(param)


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_clients_know(
    services: Services, engine: FakeEngine
) -> None:
    engine.info = msgspec.structs.replace(INFO, max_model_len=2)
    async with connect(services) as client:
        error = error_of(await client.post(URL, json=asked()), 400)
        counted = await client.post(COUNT, json={"messages": [HELLO]})
    assert error["message"].startswith("prompt is too long: ")
    assert error["details"] == {"error_code": "context_length_exceeded", "param": "messages"}
    assert counted.json()["input_tokens"] > 2


async def test_faults_of_the_engine_have_the_status_and_the_envelope(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for stream in (False, True):
        engine.refusal = TokenEvent(0, [], FinishReason.ERROR, error="full", error_code="queue_full")
        response = await client.post(URL, json=asked(stream=stream))
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        engine.refusal, engine.state = None, "restarting"
        assert error_of(await client.post(URL, json=asked(stream=stream)), 503)["type"] == "overloaded_error"
        engine.state = "serving"
    engine.submit = lambda requests: 1 / 0  # type: ignore[method-assign]
    assert error_of(await client.post(URL, json=asked()), 500)["type"] == "api_error"


async def test_a_fault_in_a_stream_is_an_event_of_anthropics(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.die_after = 6
    start, *_, error = events_of((await client.post(URL, json=asked(stream=True))).text)
    assert start["type"] == "message_start"
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
    assert "engine ended" in error["error"]["message"]
    assert error["request_id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_holds_for_messages(services: Services, engine: FakeEngine, stream: bool) -> None:
    engine.stall_after = 0
    async with connect(services, limits=ServiceLimits(request_seconds=0.1)) as client:
        response = await client.post(URL, json=asked(stream=stream))
    assert error_of(response, 504)["type"] == "timeout_error"
    assert response.headers["x-should-retry"] == "false"
    assert engine.aborted == [0]


async def test_a_silent_stream_of_messages_gets_pings(services: Services, engine: FakeEngine) -> None:
    engine.stall_after = 6
    limits = ServiceLimits(request_seconds=0.5, keep_alive_seconds=0.1)
    async with connect(services, limits=limits) as client:
        events = events_of((await client.post(URL, json=asked(stream=True))).text)
    kinds = [event["type"] for event in events]
    assert kinds.count("ping") in (3, 4, 5)
    assert (kinds[0], kinds[-1], events[-1]["error"]["type"]) == ("message_start", "error", "timeout_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_message(
    address: str, engine: FakeEngine, stream: bool
) -> None:
    engine.stall_after = 6
    async with httpx.AsyncClient(base_url=address) as client:
        post = asyncio.create_task(client.post(URL, json=asked(stream=stream)))
        await until(lambda: bool(engine.running))
        await asyncio.sleep(0.05)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await until(lambda: not engine.running)
    assert engine.aborted == [0]


async def test_events_come_as_they_are_made(address: str, engine: FakeEngine) -> None:
    engine.stall_after = 6
    async with (
        httpx.AsyncClient(base_url=address) as client,
        client.stream("POST", URL, json=asked(stream=True)) as response,
        asyncio.timeout(30),
        aclosing(response.aiter_lines()) as lines,
    ):
        async for line in lines:
            if '"text_delta"' in line:
                break


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "one"}, 200), ({"Authorization": "Bearer one"}, 200), ({"x-api-key": "admin"}, 200), ({"x-api-key": "no"}, 401),
        ({"x-api-key": "one", "Authorization": "Basic x"}, 200), ({"x-api-key": "one", "Authorization": "Bearer no"}, 401), ({}, 401),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [URL, "/v1/chat/completions", "/v1/models"])
async def test_a_key_may_come_as_x_api_key(
    services: Services, headers: dict[str, str], status: int, path: str
) -> None:
    async with connect(services, keys=Keys(("one",), "admin")) as client:
        body = asked() if path == URL else {"messages": [HELLO]}
        call = (
            client.get(path, headers=headers)
            if path == "/v1/models"
            else client.post(path, json=body, headers=headers)
        )
        assert (await call).status_code == status


async def test_the_owner_of_a_prefix_is_the_key_however_it_comes(
    services: Services, engine: FakeEngine
) -> None:
    async with connect(services, keys=Keys(("one", "two"))) as client:
        for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}, {"x-api-key": "two"}):
            assert (await client.post(URL, json=asked(), headers=headers)).status_code == 200
    first, same, other = [submitted.cache_salt for submitted in engine.submitted]
    assert first == same != other


async def test_headers_and_paths_of_anthropics_clients_are_known(client: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14,x"}
    for path in (f"{URL}?beta=true", f"{URL}/", "/messages"):
        assert (await client.post(path, json=asked(), headers=headers)).status_code == 200
    for path in (f"{COUNT}?beta=true", "/messages/count_tokens"):
        assert (await client.post(path, json={"messages": [HELLO]}, headers=headers)).status_code == 200
