"""Answers of /v1/responses, whole and streamed: over a FakeEngine that writes given texts, however it cuts
them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from headway_testing.fake_chat import EndsWith
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.response_stream import events_of, put_together, told
from headway_testing.tiny_tokenizers import save_with_delimiters
from openai.types.responses import Response

from headway.engine import FinishReason, TokenEvent
from headway.server.base.config import ServiceLimits
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("read_config", "close")]
TEMPLATE = "<tool_call></think>"
THOUGHT = "<think>\nthe quick 日本語 fox\n</think>\n\n"
FIRST = '<tool_call>\n{"name": "read_config", "arguments": {"a": "é😀"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
# By name: the model's text, and the items that it is.
TEXTS: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "thought-and-text": (THOUGHT + "the lazy dog", [("reasoning", "the quick 日本語 fox"), ("message", "the lazy dog")]),
    "all": (THOUGHT + "the lazy dog\n" + FIRST + SECOND,
            [("reasoning", "the quick 日本語 fox"), ("message", "the lazy dog"),
             ("function_call", "read_config", '{"a": "é😀"}'), ("function_call", "close", "{}")]),
    "text-between-calls": (FIRST + "\nthe dog" + SECOND,
                           [("function_call", "read_config", '{"a": "é😀"}'), ("message", "the dog"), ("function_call", "close", "{}")]),
    "calls": (FIRST + SECOND, [("function_call", "read_config", '{"a": "é😀"}'), ("function_call", "close", "{}")]),
    "text": ("the lazy dog", [("message", "the lazy dog")]),
    "text-as-in-a-delimiter": (THOUGHT + "ink and hint", [("reasoning", "the quick 日本語 fox"), ("message", "ink and hint")]),
    "thought": (THOUGHT, [("reasoning", "the quick 日本語 fox"), ("message", "")]),
    "nothing": ("", [("message", "")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_with_delimiters(tmp_path_factory.mktemp("marks"), "special"))


@pytest.fixture
def limits() -> ServiceLimits:
    return ServiceLimits()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, limits: ServiceLimits) -> Services:
    return fake_services(engine, tokenizer, EndsWith(), template=TEMPLATE, limits=limits)


async def whole(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"input": "hello", "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    answer = response.json()
    Response.model_validate(answer, strict=True)
    return answer


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"input": "hello", "tools": TOOLS, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


@pytest.mark.parametrize("name", TEXTS)
async def test_every_cut_of_the_text_gives_the_same_items(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]], name: str
) -> None:
    text, items = TEXTS[name]
    ids = write(text)
    for engine.tokens_per_round in (1, 2, 3, 7, len(ids)):
        answer = await whole(client)
        assert (told(answer["output"]), answer["status"]) == (items, "completed")
        assert {item["status"] for item in answer["output"]} == {"completed"}
        events = await streamed(client)
        last = events[-1]
        assert last["type"] == "response.completed"
        assert told(put_together(events)) == told(last["response"]["output"]) == items
        assert put_together(events) == last["response"]["output"]
        assert last["response"]["usage"] == answer["usage"]
        assert answer["usage"]["output_tokens"] == len(ids)
    assert engine.running == {}


async def test_the_events_of_an_answer_come_in_openais_order(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    ids = write(TEXTS["all"][0])
    engine.tokens_per_round = len(ids)
    events = await streamed(client)
    text = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", *(name.format("reasoning_text") for name in text),
        *(name.format("output_text") for name in text), *call, *call, "completed",
    ]  # fmt: skip
    begun = [event["response"] for event in events[:2]]
    assert begun[0] == begun[1]
    assert (begun[0]["status"], begun[0]["output"], begun[0]["usage"]) == ("in_progress", [], None)
    last = events[-1]["response"]
    assert {name for name in last if last[name] != begun[0][name]} == {
        "status",
        "output",
        "usage",
        "completed_at",
    }


async def test_the_answer_repeats_the_request(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write("the dog")
    answer = await whole(client, tools=None)
    assert re.fullmatch("resp_[0-9a-f]{24}", answer["id"])
    assert (answer["object"], answer["model"], answer["store"]) == ("response", "tiny", False)
    assert (answer["temperature"], answer["top_p"], answer["tool_choice"], answer["tools"]) == (
        1.0,
        1.0,
        "auto",
        [],
    )
    assert (answer["text"]["format"], answer["metadata"], answer["error"]) == ({"type": "text"}, {}, None)
    asked = {
        "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50, "metadata": {"a": "b"},
        "parallel_tool_calls": False, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "close"}]}, "prompt_cache_key": "k",
        "safety_identifier": "s", "user": "u", "store": True, "reasoning": {"effort": "none", "summary": "auto"},
    }  # fmt: skip
    write(SECOND)
    answer = await whole(client, **asked)
    assert {name: answer[name] for name in asked} == asked | {"store": False}
    assert [(tool["name"], tool["parameters"], tool["strict"]) for tool in answer["tools"]] == [
        ("read_config", SCHEMA, None),
        ("close", SCHEMA, None),
    ]


@pytest.mark.parametrize("num_fewer", [1, 6, 12])
async def test_an_answer_that_the_limit_cuts_is_incomplete(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], num_fewer: int
) -> None:
    """Within the text, or within the reasoning before it."""
    ids = write(TEXTS["thought-and-text"][0])
    limit = {"max_output_tokens": len(ids) - num_fewer}
    answer = await whole(client, **limit)
    events = await streamed(client, **limit)
    assert events[-1]["type"] == "response.incomplete"
    for response in (answer, events[-1]["response"]):
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in response["output"]][-1] == "incomplete"
        assert response["usage"]["output_tokens"] == len(ids) - num_fewer
    assert told(answer["output"]) == told(events[-1]["response"]["output"]) == told(put_together(events))


async def test_the_limit_after_a_call_leaves_the_call_complete(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    ids = write(FIRST + " the quick brown fox")
    answer = await whole(client, max_output_tokens=len(ids) - 2)
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


async def test_reasoning_that_is_not_wanted_has_no_item(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], tokenizer: Tokenizer
) -> None:
    write(TEXTS["all"][0])
    answer = await whole(client, include_reasoning=False)
    assert told(answer["output"]) == TEXTS["all"][1][1:]
    num_thought = len(tokenizer.encode_plain("\nthe quick 日本語 fox\n"))
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == num_thought
    events = await streamed(client, include_reasoning=False)
    assert told(put_together(events)) == TEXTS["all"][1][1:]


@pytest.mark.parametrize(
    "asked", [{"summary": "auto"}, {"summary": "detailed"}, {"generate_summary": "concise"}]
)
async def test_a_summary_that_is_asked_for_is_a_copy_of_the_reasoning(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]], asked: dict[str, str]
) -> None:
    write(TEXTS["all"][0])
    engine.tokens_per_round = 2
    answer, events = await whole(client, reasoning=asked), await streamed(client, reasoning=asked)
    thought = answer["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "the quick 日本語 fox"}]
    assert told(answer["output"]) == told(put_together(events)) == TEXTS["all"][1]
    assert put_together(events)[0] == events[-1]["response"]["output"][0]
    assert answer["reasoning"]["summary"] == next(iter(asked.values()))
    kinds = [event["type"].removeprefix("response.") for event in events if event.get("output_index") == 0]
    assert list(dict.fromkeys(kinds)) == [
        "output_item.added", "content_part.added", "reasoning_summary_part.added", "reasoning_text.delta",
        "reasoning_summary_text.delta", "reasoning_text.done", "content_part.done", "reasoning_summary_text.done",
        "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip


@pytest.mark.parametrize("asked", [{"summary": "none"}, {"summary": None}, {"summary": {}}, None])
async def test_nothing_else_gives_a_summary(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], asked: Any
) -> None:
    write(TEXTS["thought-and-text"][0])
    answer, events = await whole(client, reasoning=asked), await streamed(client, reasoning=asked)
    assert answer["output"][0]["summary"] == []
    assert not any("summary" in event["type"] for event in events)


async def test_without_parallel_calls_the_answer_ends_with_its_first(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["calls"][0])
    answer = await whole(client, parallel_tool_calls=False)
    assert told(answer["output"]) == TEXTS["calls"][1][:1]
    assert engine.running == {}


async def test_calls_are_text_where_none_may_be_made(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write("the dog" + SECOND)
    (item,) = (await whole(client, tool_choice="none"))["output"]
    assert item["type"] == "message"


@pytest.mark.parametrize("rounds", [1, 3, 100])
async def test_log_probabilities_are_those_of_the_messages_own_text(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    write: Callable[[str], list[int]],
    rounds: int,
) -> None:
    """Not of reasoning, delimiters and calls, whatever the cuts."""
    engine.tokens_per_round = rounds
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    for name in ("all", "text", "text-between-calls", "text-as-in-a-delimiter"):
        write(TEXTS[name][0])
        (item,) = [i for i in (await whole(client, **wanted))["output"] if i["type"] == "message"]
        (part,) = item["content"]
        assert "".join(entry["token"] for entry in part["logprobs"]).strip() == part["text"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        events = await streamed(client, **wanted)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
        (done,) = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == part["logprobs"]
    (item,) = (await whole(client, tools=None))["output"][-1:]
    assert item["content"][0].get("logprobs", []) == []


async def test_a_report_of_speculation_comes_with_the_end(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write("the lazy dog")
    wanted = {"speculation": {"report": True}}
    answer, events = await whole(client, **wanted), await streamed(client, **wanted)
    assert answer["speculation"]["drafted_per_position"][0] > 0
    assert answer["speculation"] == events[-1]["response"]["speculation"]
    assert "speculation" not in events[0]["response"]
    assert answer["usage"]["output_tokens_details"]["accepted_prediction_tokens"] > 0


async def test_a_refusal_of_the_engine_before_the_first_token_is_a_status(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.refusal = TokenEvent(0, [], FinishReason.ERROR, error="full", error_code="queue_full")
    for stream in (False, True):
        response = await client.post(URL, json={"input": "hello", "stream": stream})
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_a_fault_within_a_stream_is_its_last_event(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, write: Callable[[str], list[int]]
) -> None:
    write(THOUGHT + "the quick brown fox jumps over the lazy dog")
    engine.tokens_per_round, engine.die_after = 2, len(tokenizer.encode_plain(THOUGHT + "the quick"))
    events = await streamed(client)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "the engine ended while this request ran: a test",
    }
    assert told(last["response"]["output"]) == TEXTS["all"][1][:1]
    response = await client.post(URL, json={"input": "hello"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


class TestADeadline:
    @pytest.fixture
    def limits(self) -> ServiceLimits:
        return ServiceLimits(request_seconds=0.3, keep_alive_seconds=0.05)

    async def test_a_stream_is_kept_alive_and_fails_at_its_time(
        self, client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
    ) -> None:
        write("the quick brown fox")
        for engine.stall_after in (0, 3):
            response = await client.post(URL, json={"input": "hello", "stream": True})
            assert ": keep-alive" in response.text
            first, *_, last = events_of(response.text)
            assert (first["type"], last["type"]) == ("response.created", "response.failed")
            assert "request_timeout" in last["response"]["error"]["message"]
        assert (await client.post(URL, json={"input": "hello"})).status_code == 504
        assert engine.running == {}


async def test_a_client_that_hangs_up_ends_its_request(address: str, engine: FakeEngine) -> None:
    engine.round_seconds = 0.01
    async with httpx.AsyncClient(base_url=address) as client:
        body = {"input": "hello", "stream": True, "max_output_tokens": 200}
        async with client.stream("POST", URL, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("event: response.output_text.delta"):
                    break
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json={**body, "stream": False}, timeout=httpx.Timeout(30, read=0.3))
        while engine.running:
            await client.get("/health")
    assert len(engine.aborted) == 2


async def test_the_openai_client_creates_and_streams(address: str, write: Callable[[str], list[int]]) -> None:
    write(TEXTS["all"][0])
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        body: dict[str, Any] = {"model": "tiny", "input": "hello", "tools": TOOLS}
        answer = await official.responses.create(**body)
        async with official.responses.stream(**body) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert answer.output_text == final.output_text == "the lazy dog"
    assert [item.type for item in final.output] == [item.type for item in answer.output]
    assert kinds[-1] == "response.completed"


async def test_answers_are_counted_and_logged_as_those_of_chats(
    client: httpx.AsyncClient,
    write: Callable[[str], list[int]],
    services: Services,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write("the dog")
    with caplog.at_level("INFO", "headway.access"):
        answer = (await streamed(client))[-1]["response"]
        await client.post(URL, json={"input": "hello", "previous_response_id": answer["id"]})
    served, refused = (record.getMessage() for record in caplog.records)
    assert f"id={answer['id']}" in served
    assert "stream=True" in served
    assert "error_code=unsupported_parameter error_param=previous_response_id" in refused
    (family,) = [f for f in services.metrics.families() if f.name == "headway_http_responses"]
    counts = {
        s.labels["status"]: s.value
        for s in family.samples
        if s.labels.get("endpoint") == "responses" and s.value and s.name.endswith("_total")
    }
    assert counts == {"200": 1, "400": 1}


@pytest.mark.parametrize("method", ["GET", "DELETE", "POST"])
@pytest.mark.parametrize("path", ["resp_1", "resp_1/cancel", "resp_1/input_items", "compact", "input_tokens"])
async def test_answers_that_are_not_kept_are_refused_with_what_to_do(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    response = await client.request(method, f"{URL}/{path}")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_endpoint")
    assert "kept" in error["message"]
    assert "POST /v1/responses" in error["message"]


async def test_the_path_without_v1_is_the_same(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write("the dog")
    assert (await client.post("/responses/", json={"input": "hello"})).status_code == 200
    assert (await client.get(URL)).headers["allow"] == "POST"
