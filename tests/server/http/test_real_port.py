"""What only a real connection shows: the openai client, streams as they come, clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from headway_testing.fake_engine import FakeEngine
from headway_testing.waiting import until

from headway.engine import FinishReason, TokenEvent
from headway.server.text.tokenizer import Tokenizer


@pytest.fixture
async def official(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_openai_client_completes(official: openai.AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = await official.completions.create(
        model="tiny", prompt="the quick", max_tokens=4, temperature=0, seed=7,
        extra_body={"top_k": 5, "speculation": {"max_draft_tokens": 2}},
    )  # fmt: skip
    assert answer.choices[0].text == tokenizer.decode((tokenizer.encode("the quick") * 4)[:4])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 2


async def test_the_openai_client_streams_with_usage(
    official: openai.AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    stream = await official.completions.create(
        model="tiny", prompt="日本語 😀", max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    ids = tokenizer.encode("日本語 😀")
    assert "".join(c.choices[0].text for c in chunks) == tokenizer.decode((ids * 20)[:20])
    assert last.usage is not None
    assert last.usage.total_tokens == len(ids) + 20


async def test_the_openai_client_gets_typed_errors(official: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await official.completions.create(model="tiny", prompt="a" * 5000, max_tokens=4)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        await official.completions.create(model="gpt-4", prompt="a")
    assert missing.value.code == "model_not_found"
    engine.refusal = TokenEvent(0, [], FinishReason.ERROR, error="full", error_code="queue_full")
    with pytest.raises(openai.RateLimitError):
        await official.completions.create(model="tiny", prompt="a")
    engine.refusal, engine.state = None, "restarting"
    with pytest.raises(openai.InternalServerError) as down:
        await official.completions.create(model="tiny", prompt="a")
    assert down.value.status_code == 503


async def test_the_openai_client_raises_when_the_engine_dies_in_a_stream(
    official: openai.AsyncOpenAI, engine: FakeEngine
) -> None:
    engine.die_after = 6
    stream = await official.completions.create(model="tiny", prompt="abc", max_tokens=50, stream=True)
    with pytest.raises(openai.APIError, match="engine ended"):
        [chunk async for chunk in stream]


async def test_deltas_arrive_while_the_rest_is_still_to_come(address: str, engine: FakeEngine) -> None:
    engine.stall_after = 3
    body = {"prompt": "abc def", "max_tokens": 50, "stream": True}
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", f"{address}/v1/completions", json=body) as response,
    ):
        line = await asyncio.wait_for(anext(response.aiter_lines()), 30)
    assert json.loads(line.removeprefix("data: "))["choices"][0]["text"]


@pytest.mark.parametrize("stall_after", [0, 6], ids=["before-the-first-token", "in-the-middle"])
@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_hanging_up_aborts_every_choice(
    address: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool, stall_after: int
) -> None:
    engine.stall_after = stall_after
    body = {"prompt": "abc", "n": 3, "max_tokens": 50, "stream": stream}
    async with httpx.AsyncClient() as client:
        post = asyncio.create_task(client.post(f"{address}/v1/completions", json=body))
        await until(lambda: len(engine.running) == 3)
        await asyncio.sleep(0.02)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    await until(lambda: not engine.running)
    assert sorted(engine.aborted) == [0, 1, 2]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_finished_request_is_not_aborted(address: str, engine: FakeEngine) -> None:
    async with httpx.AsyncClient() as client:
        for stream in (False, True):
            body = {"prompt": "abc", "n": 2, "stream": stream}
            assert (await client.post(f"{address}/v1/completions", json=body)).status_code == 200
    assert engine.aborted == []


async def test_64_streams_at_once_all_finish(address: str, engine: FakeEngine) -> None:
    engine.round_seconds = 0.002
    limits = httpx.Limits(max_connections=64)

    async def one(client: httpx.AsyncClient) -> str:
        body = {"prompt": "the quick", "max_tokens": 40, "stream": True}
        return (await client.post(f"{address}/v1/completions", json=body)).text

    async with httpx.AsyncClient(limits=limits, timeout=20) as client:
        texts = await asyncio.gather(*(one(client) for _ in range(64)))
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    assert not engine.running
