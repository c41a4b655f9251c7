"""Reasoning and calls of tools in answers, however the engine cuts the text: over a FakeEngine that writes
given texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from headway_testing.fake_chat import EndsWith
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.tiny_tokenizers import save_with_delimiters

from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}},
    }
    for name in ("read_config", "close")
]
TEMPLATE = "<tool_call></think>"
THOUGHT = "<think>\nthe quick 日本語 fox\n</think>\n\n"
FIRST = '<tool_call>\n{"name": "read_config", "arguments": {"a": "é😀"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
TEXTS = {
    "thought-and-content": THOUGHT + "the lazy dog",
    "thought-content-calls": THOUGHT + "the lazy dog\n" + FIRST + SECOND,
    "calls-alone": FIRST + SECOND,
    "a-call-that-does-not-end": THOUGHT + "the dog " + FIRST[:-20],
    "no-call": "the dog <tool_call>\n{brown}\n</tool_call>",
    "content-alone": "the lazy dog",
    "thought-alone": "<think>the quick",
}  # fmt: skip


@pytest.fixture(scope="session", params=["special", "added", "spelled"])
def tokenizer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tokenizer:
    """The delimiters are special tokens, or tokens, or ordinary text."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(save_with_delimiters(folder, request.param))


@pytest.fixture
def ending() -> str:
    return "assistant:"


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, ending: str) -> Services:
    chat = EndsWith(ending)
    return fake_services(engine, tokenizer, chat, template=TEMPLATE)


async def whole(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    body = {
        "messages": HELLO,
        "tools": TOOLS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    response = await client.post(URL, json=body)
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def message_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together of one choice's chunks; ids of calls are left out."""
    texts = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls = []
    for choice in choices:
        for name in texts:
            texts[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert call["index"] == len(calls)
            calls.append((call["type"], call["function"]))
    return {**texts, "calls": calls, "finish_reason": choices[-1]["finish_reason"]}


def as_message(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole answer in the form of `message_of`."""
    message = choice["message"]
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls", ())]
    texts = {name: message[name] or "" for name in ("content", "reasoning_content", "reasoning")}
    return {**texts, "calls": calls, "finish_reason": choice["finish_reason"]}


async def test_calls_have_the_shape_of_openai(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["calls-alone"])
    (choice,) = (await whole(client))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    first, second = choice["message"]["tool_calls"]
    assert re.fullmatch("call_[0-9a-f]{24}", first["id"])
    assert first["id"] != second["id"]
    assert (first["type"], first["function"]["name"]) == ("function", "read_config")
    assert json.loads(first["function"]["arguments"]) == {"a": "é😀"}
    assert (second["function"]["name"], json.loads(second["function"]["arguments"])) == ("close", {})


async def test_reasoning_is_told_apart_by_both_names(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    ids = write(TEXTS["thought-and-content"])
    answer = await whole(client, tools=None)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "the quick 日本語 fox"
    assert (message["content"], choice["finish_reason"]) == ("the lazy dog", "stop")
    assert "tool_calls" not in message
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_reasoning_that_is_not_wanted_is_left_out(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["thought-and-content"])
    (choice,) = (await whole(client, include_reasoning=False))["choices"]
    assert choice["message"] == {"content": "the lazy dog", "role": "assistant", "refusal": None}
    choices = [c["choices"][0] for c in await streamed(client, include_reasoning=False) if c["choices"]]
    assert all(set(choice["delta"]) <= {"role", "content"} for choice in choices)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "the lazy dog"


@pytest.mark.parametrize("name", TEXTS)
async def test_every_cut_of_the_text_says_the_same(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]], name: str
) -> None:
    ids = write(TEXTS[name])
    expected = as_message((await whole(client))["choices"][0])
    usages = []
    for engine.tokens_per_round in (1, 2, 3, 5, 7, len(ids)):
        answer = await whole(client)
        assert as_message(answer["choices"][0]) == expected
        *chunks, last = await streamed(client)
        assert message_of([chunk["choices"][0] for chunk in chunks]) == expected
        assert answer["usage"] == last["usage"]
        details = last["usage"]["completion_tokens_details"]
        usages.append((last["usage"]["completion_tokens"], details.get("reasoning_tokens")))
    assert len(set(usages)) == 1


async def test_nothing_of_a_text_that_is_no_call_is_lost(
    client: httpx.AsyncClient, write: Callable[[str], list[int]]
) -> None:
    for name in ("no-call", "a-call-that-does-not-end"):
        write(TEXTS[name])
        (choice,) = (await whole(client))["choices"]
        assert choice["message"]["content"] == TEXTS[name].removeprefix(THOUGHT)
        assert choice["finish_reason"] == "stop"


async def test_the_limit_stays_the_reason_of_an_answer_with_calls(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    ids = write(FIRST + " the quick brown fox")
    (choice,) = (await whole(client, max_tokens=len(ids) - 2))["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)


async def test_calls_are_content_where_none_may_be_made(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], tokenizer: Tokenizer
) -> None:
    ids = write(TEXTS["calls-alone"])
    for body in ({"tools": None}, {"tool_choice": "none"}):
        (choice,) = (await whole(client, **body))["choices"]
        assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
        assert choice["message"]["content"] == tokenizer.decode(ids)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 100])
async def test_without_parallel_calls_the_answer_ends_with_its_first(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    write: Callable[[str], list[int]],
    rounds: int,
) -> None:
    """At the token that completes the call: the rest of the window counts as little as text after a stop
    string."""
    write(THOUGHT + FIRST + SECOND + " and more")
    engine.tokens_per_round = rounds
    num_tokens = len(tokenizer.encode_plain(THOUGHT + FIRST))
    answer = await whole(client, parallel_tool_calls=False, return_token_ids=True)
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["read_config"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == num_tokens
    assert engine.running == {}
    *chunks, last = await streamed(client, parallel_tool_calls=False)
    assert message_of([chunk["choices"][0] for chunk in chunks])["calls"] == [
        ("function", choice["message"]["tool_calls"][0]["function"])
    ]
    assert last["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("rounds", [1, 3, 50])
async def test_every_token_is_told_once_beside_the_parts(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]], rounds: int
) -> None:
    ids = write(TEXTS["thought-content-calls"])
    engine.tokens_per_round = rounds
    body = {"logprobs": True, "return_token_ids": True, "speculation": {"draft_positions": True}}
    chunks = [chunk["choices"][0] for chunk in (await streamed(client, **body))[:-1]]
    assert [i for choice in chunks for i in choice.get("token_ids", ())] == ids
    assert sum(len(choice["logprobs"]["content"]) for choice in chunks if choice["logprobs"]) == len(ids)
    positions = [p for choice in chunks for p in choice.get("speculation", {}).get("draft_positions", ())]
    assert len(positions) == len(ids)
    (choice,) = (await whole(client, **body))["choices"]
    assert (choice["token_ids"], choice["speculation"]["draft_positions"]) == (ids, positions)
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("rounds", [1, 2, 3, 50])
@pytest.mark.parametrize("name", TEXTS)
async def test_every_character_of_a_part_has_its_token(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    write: Callable[[str], list[int]],
    name: str,
    rounds: int,
) -> None:
    """By offsets: the tokens told by then, each with its text, hold the part at its place."""
    write(TEXTS[name])
    engine.tokens_per_round = rounds
    body = {"return_token_ids": True, "speculation": {"draft_positions": True}}
    chunks = [chunk["choices"][0] for chunk in (await streamed(client, **body))[:-1]]
    ids, offsets = list[int](), list[int]()
    for choice in chunks:
        told = choice.get("speculation", {})
        ids += choice.get("token_ids", ())
        offsets += told.get("text_offset", ())
        assert len(ids) == len(offsets)
        delta = choice["delta"]
        if part := delta.get("content") or delta.get("reasoning_content"):
            start = told["delta_offset"]
            text = tokenizer.full_vocabulary.decode(ids)
            assert text[start:].startswith(part)
            assert offsets[0] <= start
            assert start + len(part) <= len(text)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
async def test_a_chunk_of_content_has_the_tokens_of_its_text(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    write: Callable[[str], list[int]],
    rounds: int,
) -> None:
    """White space at the end of a round comes with the text after it, and so do its tokens; the token that
    ends the text is in a chunk without content. guidance reads a chunk by its tokens."""
    ids = write("the quick brown fox jumps over the lazy dog, the end")
    engine.tokens_per_round = rounds
    chunks = [chunk["choices"][0] for chunk in (await streamed(client, return_token_ids=True))[:-1]]
    assert [token for chunk in chunks for token in chunk.get("token_ids") or ()] == ids
    told = [
        (chunk["delta"]["content"], chunk["token_ids"]) for chunk in chunks if chunk["delta"].get("content")
    ]
    assert len(told) > 1
    assert [tokenizer.decode(some) for _, some in told] == [content for content, _ in told]
    assert all(ids[-1] not in some for _, some in told)


async def test_each_choice_has_a_text_of_its_own(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    texts = [THOUGHT + "the dog", FIRST + SECOND, "the cat"]
    engine.script = lambda request: [
        *tokenizer.encode_plain(texts[request.request_id % 3]), tokenizer.stop_token_ids[0]
    ]  # fmt: skip
    choices = (await whole(client, n=3))["choices"]
    assert [choice["message"]["content"] for choice in choices] == ["the dog", None, "the cat"]
    assert [choice["message"]["reasoning"] for choice in choices] == ["the quick 日本語 fox", None, None]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "tool_calls", "stop"]
    chunks = [chunk["choices"][0] for chunk in (await streamed(client, n=3))[:-1]]
    for choice in choices:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert message_of(own) == as_message(choice)


async def test_special_tokens_that_delimit_nothing_stay_hidden(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode_plain(THOUGHT + "the <|endoftext|>dog" + FIRST)
    engine.script = lambda request: ids
    (choice,) = (await whole(client, ignore_eos=True))["choices"]
    assert (choice["message"]["content"], len(choice["message"]["tool_calls"])) == ("the dog", 1)


async def test_continuous_usage_counts_the_reasoning_so_far(
    client: httpx.AsyncClient, engine: FakeEngine, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["thought-and-content"])
    *chunks, last = await streamed(client, stream_options={"continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens_details"].get("reasoning_tokens", 0) for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens_details"].get("reasoning_tokens", 0)


@pytest.mark.parametrize("rounds", [1, 2, 3, 50])
async def test_reasoning_tokens_are_those_between_the_delimiters(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    write: Callable[[str], list[int]],
    rounds: int,
) -> None:
    """They are told only where the delimiters are tokens."""
    engine.tokens_per_round = rounds
    num_tokens = len(tokenizer.encode_plain("\nthe quick 日本語 fox\n"))
    for name, count in (("thought-and-content", num_tokens), ("content-alone", 0)):
        write(TEXTS[name])
        details = (await whole(client, n=2))["usage"]["completion_tokens_details"]
        if tokenizer.token_id("<think>") is None:
            assert "reasoning_tokens" not in details
        else:
            assert details["reasoning_tokens"] == 2 * count


async def test_the_openai_client_puts_a_stream_together(
    address: str, write: Callable[[str], list[int]]
) -> None:
    write(TEXTS["thought-content-calls"])
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
        body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
        answer = await official.chat.completions.create(**body)
        async with official.chat.completions.stream(**body) as stream:
            final = await stream.get_final_completion()
    message, other = answer.choices[0].message, final.choices[0].message
    assert message.content == other.content == "the lazy dog"
    assert message.tool_calls is not None
    assert other.tool_calls is not None
    assert [c.function.name for c in message.tool_calls] == ["read_config", "close"]
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
        (c.function.name, c.function.arguments) for c in other.tool_calls
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "the quick 日本語 fox"


class TestAPromptThatOpensReasoning:
    @pytest.fixture
    def ending(self) -> str:
        return "assistant:<think>\n"

    async def test_the_answer_begins_with_reasoning(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        write: Callable[[str], list[int]],
        tokenizer: Tokenizer,
    ) -> None:
        write("the quick fox\n</think>\n\nthe dog")
        engine.tokens_per_round = 1
        answer = await whole(client)
        (choice,) = answer["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("the quick fox", "the dog")
        num_tokens = len(tokenizer.encode_plain("the quick fox\n"))
        if tokenizer.token_id("</think>") is not None:
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


class TestAPromptThatClosesReasoning:
    @pytest.fixture
    def ending(self) -> str:
        return "assistant:<think>\n\n</think>\n\n"

    async def test_the_answer_is_content(
        self, client: httpx.AsyncClient, write: Callable[[str], list[int]]
    ) -> None:
        write("the dog")
        answer = await whole(client)
        (choice,) = answer["choices"]
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, "the dog")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_calls_are_counted_by_outcome(
    client: httpx.AsyncClient, write: Callable[[str], list[int]], services: Services
) -> None:
    def counted() -> dict[str, float]:
        (family,) = [f for f in services.metrics.families() if f.name == "headway_tool_calls"]
        samples = [s for s in family.samples if s.name.endswith("_total")]
        assert {s.labels["format"] for s in samples} == {"hermes"}
        return {s.labels["outcome"]: s.value for s in samples}

    assert counted() == {"parsed": 0, "malformed": 0}
    write(TEXTS["thought-content-calls"])
    await whole(client, n=2)
    write(TEXTS["no-call"])
    await streamed(client)
    assert counted() == {"parsed": 4, "malformed": 1}
    await whole(client, tool_choice="none")
    assert counted() == {"parsed": 4, "malformed": 1}


async def test_ready_tells_the_form_of_calls(client: httpx.AsyncClient) -> None:
    assert (await client.get("/ready")).json()["tool_format"] == "hermes"


@pytest.mark.parametrize("rounds", [1, 3, 100])
async def test_a_call_that_the_limit_cuts_shows_no_markup(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    write: Callable[[str], list[int]],
    tokenizer: Tokenizer,
    rounds: int,
) -> None:
    write(THOUGHT + "the dog " + FIRST)
    engine.tokens_per_round = rounds
    for end in ("{", '"name": "read', '"arguments": {"a": "é'):
        text = (THOUGHT + "the dog " + FIRST).partition(end)
        num_tokens = len(tokenizer.encode_plain(text[0] + text[1]))
        answer = await whole(client, max_tokens=num_tokens)
        (told,) = answer["choices"]
        assert (told["message"]["content"], told["finish_reason"]) == ("the dog", "length")
        assert "tool_calls" not in told["message"]
