"""The product as its users meet it: HTTP, the official client, disconnects, a killed engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from importlib.resources import files
from typing import Any

import httpx
import openai
import pytest
from headway_testing.daemon import START_SECONDS, headway_command

PROMPT = "def read_config(path):\n"


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    path = files("headway.engine.demo").joinpath("heldout_prompts.json")
    return [entry["text"] for entry in json.loads(path.read_text())]


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_readme_curl_line_gets_python(server: Any) -> None:
    """What it draws may be any text; the likeliest is code."""
    headers = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d sends
    for wish in ({}, {"temperature": 0}):
        body = json.dumps({"prompt": PROMPT, "max_tokens": 64} | wish)
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).json()
        choice = answer["choices"][0]
        assert 1 <= answer["usage"]["completion_tokens"] <= 64
        assert choice["finish_reason"] in ("length", "stop")
    assert choice["text"].startswith((" ", "\n", "#", "\t"))
    assert any(word in choice["text"] for word in ("return", "if ", "self", "=", "try:", '"""'))


def test_a_page_of_another_site_cannot_use_a_local_server(server: Any) -> None:
    own = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, headers={"Origin": server.url})
    assert own.status_code == 200
    for header in ({"Host": "attacker.example"}, {"Origin": "https://attacker.example"}):
        response = httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, headers=header)
        assert response.status_code == 403


def test_the_openai_client_completes_and_is_reproducible(client: openai.OpenAI) -> None:
    first, second = (
        client.completions.create(model="headway-demo", prompt=PROMPT, max_tokens=40, seed=7, temperature=0.8)
        for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert first.usage is not None
    assert first.usage.completion_tokens == 40


def test_the_openai_client_streams_with_usage(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "headway-demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    whole, stream = (
        client.completions.create(**common, extra_body={"cache_salt": salt}, **streams)
        for salt, streams in (("a", {}), ("b", {"stream": True, "stream_options": {"include_usage": True}}))
    )  # of two salts, so that both compute the whole prompt
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].usage is not None
    details = chunks[-1].usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens


def test_the_openai_client_gets_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="headway-demo", prompt="x = 1\n" * 2000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-none", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="headway-demo", prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"


def test_a_request_that_turns_speculation_off_gets_the_same_text(client: openai.OpenAI) -> None:
    def text(max_draft_tokens: int) -> tuple[str, int]:
        answer = client.completions.create(
            model="headway-demo", prompt=PROMPT, max_tokens=100, temperature=0.8, seed=3,
            extra_body={"speculation": {"max_draft_tokens": max_draft_tokens}},
        )  # fmt: skip
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        return answer.choices[0].text, details.accepted_prediction_tokens or 0

    (plain, none), (drafted, accepted) = text(0), text(3)
    assert plain == drafted
    assert none == 0 < accepted


@pytest.mark.slow
def test_a_terminal_gets_the_text_of_the_server(server: Any) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    served = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    command = headway_command("complete", PROMPT, "--max-tokens", "24", "--device", "cpu", "--depth", "3")
    done = subprocess.run(
        [*command, "--temperature", "0"], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == f"{PROMPT}{served}\n"


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], stop_after: float | None = None) -> str:
    """Reads a stream to its end, or leaves at that moment."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        started = time.monotonic()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
            if stop_after is not None and time.monotonic() - started > stop_after:
                return text
            if line == "data: [DONE]":
                return text
    raise AssertionError("the stream ended without [DONE]")


def client_of(server: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [24, pytest.param(64, marks=pytest.mark.long)])
async def test_many_streams_at_once_all_finish(server: Any, prompts: list[str], num_streams: int) -> None:
    async with client_of(server) as http:
        bodies = [
            {
                "prompt": prompts[i % len(prompts)],
                "max_tokens": 30,
                "temperature": 0.8,
                "seed": i,
                "ignore_eos": True,
            }
            for i in range(num_streams)
        ]
        texts = await asyncio.gather(*(read_stream(http, body) for body in bodies))
        alone = await read_stream(http, bodies[17])
    assert all(texts)
    assert texts[17] == alone
    await asyncio.to_thread(server.wait_until_idle)


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [60, pytest.param(200, marks=pytest.mark.long)])
async def test_after_requests_with_disconnects_every_block_is_free(
    server: Any, prompts: list[str], num_requests: int
) -> None:
    chance = random.Random(0)
    gate = asyncio.Semaphore(24)
    aborted_before = await asyncio.to_thread(finished, server, "abort")

    async def one(http: httpx.AsyncClient, i: int) -> None:
        leaves = i % 3 == 0
        body = {
            "prompt": chance.choice(prompts),
            "max_tokens": 200 if leaves else 16,
            "seed": i,
            "ignore_eos": True,
        }
        async with gate:
            await read_stream(http, body, stop_after=chance.random() * 0.3 if leaves else None)

    async with client_of(server) as http:
        await asyncio.gather(*(one(http, i) for i in range(num_requests)))
    await asyncio.to_thread(server.wait_until_idle)
    assert await asyncio.to_thread(finished, server, "abort") - aborted_before > num_requests // 6


def finished(server: Any, reason: str) -> float:
    try:
        return float(server.metric("headway_requests_finished_total", reason=reason))
    except AssertionError:
        return 0.0


async def test_a_killed_engine_loses_no_stream_and_comes_back(server: Any) -> None:
    restarts = server.metric("headway_engine_restarts_total")
    endings: list[str] = []

    async def one(http: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": 200, "seed": i, "stream": True, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            endings.append([line async for line in response.aiter_lines() if line][-1])

    async with client_of(server) as http:
        streams = [asyncio.create_task(one(http, i)) for i in range(8)]
        await asyncio.sleep(0.5)
        os.kill(server.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        while (await http.get("/ready")).status_code != 200:
            assert time.monotonic() - killed < START_SECONDS
            await asyncio.sleep(0.1)
        await asyncio.gather(*streams)
    assert endings == ["data: [DONE]"] * 8
    assert server.metric("headway_engine_restarts_total") == restarts + 1


@pytest.mark.slow
async def test_metrics_agree_with_a_recorded_run(server: Any, prompts: list[str]) -> None:
    names = [
        "headway_generation_tokens_total",
        "headway_prompt_tokens_total",
        "headway_spec_decode_num_draft_tokens_total",
        "headway_spec_decode_num_accepted_tokens_total",
    ]
    async with client_of(server) as http:  # positions are told of once they had a draft
        await http.post("/v1/completions", json={"prompt": prompts[0], "max_tokens": 8, "ignore_eos": True})
    await asyncio.to_thread(server.wait_until_idle)
    before = [server.metric(name) for name in names]
    by_position = [per_position(server, kind) for kind in ("draft", "accepted")]
    usages = []
    async with client_of(server) as http:
        for i in range(6):
            body = {
                "prompt": prompts[i],
                "max_tokens": 10 + 7 * i,
                "temperature": 0.8,
                "seed": i,
                "ignore_eos": True,
            }
            usages.append((await http.post("/v1/completions", json=body)).json()["usage"])
    await asyncio.to_thread(server.wait_until_idle)
    generated, prompt_tokens, drafted, accepted = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    details = [usage["completion_tokens_details"] for usage in usages]
    assert generated == sum(usage["completion_tokens"] for usage in usages)
    assert prompt_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert accepted == sum(d["accepted_prediction_tokens"] for d in details)
    assert drafted - accepted == sum(d["rejected_prediction_tokens"] for d in details)
    drafts, hits = (
        [new - old for new, old in zip(per_position(server, kind), olds, strict=True)]
        for kind, olds in zip(("draft", "accepted"), by_position, strict=True)
    )
    assert sum(drafts) == drafted
    assert sum(hits) == accepted
    assert hits == sorted(hits, reverse=True)


def per_position(server: Any, kind: str) -> list[float]:
    name = f"headway_spec_decode_num_{kind}_tokens_per_pos_total"
    return [server.metric(name, position=str(position)) for position in (1, 2, 3)]
