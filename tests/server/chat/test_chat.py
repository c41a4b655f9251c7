"""POST /v1/chat/completions over a FakeEngine: shapes, streams, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_chat import FakeChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.base.conversation import Conversation
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


class PlainChat(FakeChat):
    """What the tests' template makes of messages, without a process."""

    async def render(self, conversation: Conversation) -> str:
        end = tiny_tokenizers.END_OF_TEXT
        return "".join(f"{m['role']}: {m['content']}{end}\n" for m in conversation.messages) + "assistant: "


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer) -> Services:
    return fake_services(engine, tokenizer, PlainChat())


@pytest.fixture
def fox(engine: FakeEngine, tokenizer: Tokenizer) -> list[int]:
    """The script of every request."""
    ids = tokenizer.encode("the quick brown fox 日本語 😀")
    engine.script = lambda request: ids
    return ids


async def chat(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"messages": HELLO, "stream": True, **body})
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_a_chat_completion_has_the_shape_of_openai(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, fox: list[int]
) -> None:
    answer = await chat(client, max_completion_tokens=4, temperature=0)
    prompt = tokenizer.encode_plain("user: hello<|endoftext|>\nassistant: ")
    assert engine.submitted[0].prompt_token_ids == prompt
    assert tokenizer.stop_token_ids[0] in prompt
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    message = {"content": tokenizer.decode(fox[:4]), "role": "assistant", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": 4, "total_tokens": len(prompt) + 4,
        "completion_tokens_details": {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 4},
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(
    client: httpx.AsyncClient, tokenizer: Tokenizer, fox: list[int]
) -> None:
    first, *middle, last, usage = await chunks(client, n=1, stream_options={"include_usage": True})
    assert {first["object"], last["object"]} == {"chat.completion.chunk"}
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert all(set(c["choices"][0]["delta"]) == {"content"} for c in middle)
    assert "".join(c["choices"][0]["delta"]["content"] for c in middle) == tokenizer.decode(fox)
    ending = {"finish_reason": "length", "stop_reason": None}
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, **ending}]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(fox))


async def test_every_choice_of_a_stream_has_role_text_and_reason(
    client: httpx.AsyncClient, tokenizer: Tokenizer, fox: list[int]
) -> None:
    entries = [c["choices"][0] for c in await chunks(client, n=3)]
    for index in range(3):
        own = [entry for entry in entries if entry["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(entry["delta"].get("content", "") for entry in own) == tokenizer.decode(fox)
        assert [entry["finish_reason"] for entry in own[-2:]] == [None, "length"]


async def test_without_a_limit_the_context_is_the_limit(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for limit in (
        {},
        {"max_tokens": 5},
        {"max_completion_tokens": 6},
        {"max_tokens": 7, "max_completion_tokens": 7},
    ):
        await chat(client, **limit)
    room = 256 - len(engine.submitted[0].prompt_token_ids)
    assert [submitted.max_tokens for submitted in engine.submitted] == [room, 5, 6, 7]


async def test_parts_are_lines_and_developers_are_the_system(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    await chat(
        client, messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    )
    text = tokenizer.full_vocabulary.decode(engine.submitted[0].prompt_token_ids)
    assert text == "system: be brief<|endoftext|>\nuser: one\ntwo<|endoftext|>\nassistant: "


async def test_the_shared_fields_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, fox: list[int]
) -> None:
    answer = await chat(
        client, top_k=7, stop_token_ids=[fox[3]], cache_salt="s", return_token_ids=True,
        speculation={"max_draft_tokens": 2, "report": True, "draft_positions": True},
    )  # fmt: skip
    (submitted,) = engine.submitted
    assert (submitted.sampling.top_k, submitted.cache_salt, submitted.max_draft_tokens) == (7, "s", 2)
    assert answer["prompt_token_ids"] == submitted.prompt_token_ids
    assert answer["choices"][0]["token_ids"] == fox[:4]
    assert answer["speculation"]["max_draft_tokens"] == 2
    assert answer["choices"][0]["speculation"]["draft_positions"] == [1, 2, 0, 0]
    pieces = [
        part["choices"][0].get("speculation")
        for part in await chunks(client, speculation={"draft_positions": True})
    ]
    assert next(piece["draft_positions"] for piece in pieces if piece) == [1, 2, 0]


async def test_the_openai_client_chats_and_streams(
    address: str, tokenizer: Tokenizer, fox: list[int]
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        whole = await official.chat.completions.create(model="tiny", messages=HELLO, seed=7)
        assert whole.choices[0].message.content == tokenizer.decode(fox)
        options = {"include_usage": True}
        stream = await official.chat.completions.create(
            model="tiny", messages=HELLO, seed=7, stream=True, stream_options=options
        )
        parts = [chunk async for chunk in stream]
        assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == tokenizer.decode(fox)
        assert parts[-1].usage == whole.usage
        with pytest.raises(openai.BadRequestError) as refused:
            await official.chat.completions.create(model="tiny", messages=image("image_url"))
        assert refused.value.code == "unsupported_content"


def image(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]


WRONG = [
    ("messages", [], "messages"), ("messages", "hello", "messages"), ("messages", None, "messages"),
    ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"), ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": None}], "messages[0].content"),
    ("messages", [*HELLO, {"role": "user", "content": "x", "contents": 1}], "messages[1].contents"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ("messages", image("image_url"), "messages[0].content[0].type"),
    ("messages", image("input_audio"), "messages[0].content[0].type"), ("messages", image("file"), "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}], "messages[0].content[0].refusal"),
    ("messages", [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": "x", "file": {}}]}], "messages[0].content[0].type"),
    ("messages", HELLO * 4097, "messages"), ("tools", [{"type": "function"}], "tools[0].function"), ("tool_choice", "required", "tool_choice"),
    ("functions", [{}], "functions"), ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("modalities", ["text", "audio"], "modalities"), ("web_search_options", {}, "web_search_options"),
    ("reasoning_effort", "extreme", "reasoning_effort"), ("max_completion_tokens", 0, "max_completion_tokens"),
    ("max_tokens", 0, "max_tokens"), ("top_logprobs", 2, "top_logprobs"), ("logprobs", 2, "logprobs"), ("message", "x", "message"),
    ("echo", True, "echo"), ("best_of", 2, "best_of"), ("max_tokens", 300, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "param"), WRONG, ids=[f"{i}-{p}" for i, (_, _, p) in enumerate(WRONG)]
)
async def test_a_wrong_value_is_refused_by_its_path(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: Any, param: str
) -> None:
    error = await refusal(client, **{field: value})
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert not engine.submitted


async def test_two_limits_that_differ_are_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, max_tokens=3, max_completion_tokens=4)
    assert error["message"] == "max_tokens is 3, it must be max_completion_tokens = 4, or left out"


NEUTRAL = {
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
    "modalities": ["text"], "logprobs": False, "top_logprobs": 0, "store": False, "metadata": {}, "audio": None,
    "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}, "safety_identifier": "x",
}  # fmt: skip


@pytest.mark.parametrize("field", NEUTRAL)
async def test_values_that_change_nothing_are_accepted(client: httpx.AsyncClient, field: str) -> None:
    await chat(client, max_tokens=2, **{field: NEUTRAL[field]})


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
@pytest.mark.parametrize("num_words", [20_000, 200], ids=["before-it-is-encoded", "encoded"])
async def test_a_chat_over_the_context_is_context_length_exceeded(
    client: httpx.AsyncClient, num_words: int, stream: bool
) -> None:
    error = await refusal(client, messages=[{"role": "user", "content": "word " * num_words}], stream=stream)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_too_many_tokens_are_refused_by_the_name_they_came_by(
    client: httpx.AsyncClient, field: str
) -> None:
    error = await refusal(client, **{field: 5000})
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert error["message"].endswith(f"reduce your prompt or {field}.")


class TestStringsOfTheTemplate:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return replace(services, chat_stop_strings=("quick",))

    async def test_they_end_a_chat_beside_those_of_the_request_and_no_completion(
        self, client: httpx.AsyncClient, fox: list[int]
    ) -> None:
        choice = (await chat(client))["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("the ", "quick")
        choice = (await chat(client, stop="he"))["choices"][0]
        assert (choice["message"]["content"], choice["stop_reason"]) == ("t", "he")
        assert "quick brown" in (await chat(client, ignore_eos=True))["choices"][0]["message"]["content"]
        answer = (await client.post("/v1/completions", json={"prompt": "a"})).json()
        assert "quick brown" in answer["choices"][0]["text"]


class TestWithoutATemplate:
    @pytest.fixture
    def services(self, engine: FakeEngine, tokenizer: Tokenizer) -> Services:
        return fake_services(engine, tokenizer)

    async def test_chat_is_refused_with_what_to_do_instead(self, client: httpx.AsyncClient) -> None:
        error = await refusal(client)
        assert error["code"] == "chat_not_supported"
        assert "no chat template" in error["message"]
        assert "/v1/completions" in error["message"]
