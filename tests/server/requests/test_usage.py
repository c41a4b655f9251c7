"""What answers tell of cached tokens and of the server, and by which names a model is called."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import msgspec
import openai
import pytest
from headway_testing.fake_engine import INFO, FakeEngine

from headway.server.app import create_app
from headway.server.base.config import ServiceLimits
from headway.server.requests.services import Services

URL = "/v1/completions"


async def events(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(URL, json={"prompt": "hello", "stream": True, **body})
    return [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]


def client_of(services: Services) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(services)), base_url="http://headway")


@pytest.mark.parametrize(
    ("body", "found", "told"),
    [({}, [3], 3), ({"n": 3}, [16, 0, 16], 0), ({"n": 2, "prompt": ["a b", "c d"]}, [2, 3, 7, 4], 6)],
    ids=["one", "the-rest-finds-what-the-first-computed", "each-prompt-once"],
)
async def test_cached_prompt_tokens_are_counted_once_a_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], found: list[int], told: int
) -> None:
    engine.num_cached = lambda request: found[request.request_id]
    answer = (await client.post(URL, json={"prompt": "hello", **body})).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": told}


async def test_a_stream_tells_cached_tokens_and_one_fingerprint(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.num_cached = lambda request: 2
    first, *_, last = chunks = await events(client, stream_options={"continuous_usage_stats": True})
    assert (
        first["usage"]["prompt_tokens_details"]
        == last["usage"]["prompt_tokens_details"]
        == {"cached_tokens": 2}
    )
    whole = (await client.post(URL, json={"prompt": "hello"})).json()
    assert {chunk["system_fingerprint"] for chunk in chunks} == {whole["system_fingerprint"]}


async def test_the_fingerprint_is_another_for_another_model_or_precision(services: Services) -> None:
    other = FakeEngine(msgspec.structs.replace(INFO, dtype="bfloat16"))
    narrow = FakeEngine(msgspec.structs.replace(INFO, cpu_weights="int8"))
    variants: list[dict[str, Any]] = [{}, {}, {"model_name": "other"}, {"engine": other}, {"engine": narrow}]
    found = []
    for changes in variants:
        async with client_of(dataclasses.replace(services, **changes)) as client:
            found.append((await client.post(URL, json={"prompt": "hello"})).json()["system_fingerprint"])
    assert found[0] == found[1]
    assert len({*found}) == 4


async def test_the_fingerprint_of_a_lossy_server_says_so(services: Services) -> None:
    lossy = FakeEngine(msgspec.structs.replace(INFO, relaxed_thinking=(5, 0.3)))
    found = []
    for engine in (services.engine, lossy):
        async with client_of(dataclasses.replace(services, engine=engine)) as client:
            found.append((await client.post(URL, json={"prompt": "hello"})).json()["system_fingerprint"])
    assert ["LOSSY" in fingerprint for fingerprint in found] == [False, True]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_a_server_may_end_every_stream_with_its_usage(services: Services, options: Any) -> None:
    forced = dataclasses.replace(services, limits=ServiceLimits(force_include_usage=True))
    async with client_of(forced) as client:
        *chunks, last = await events(client, stream_options=options)
    assert last["usage"]["prompt_tokens"] > 0
    assert last["choices"] == []
    assert {chunk["usage"] for chunk in chunks} == {None}
    async with client_of(services) as client:
        assert not any(chunk.get("usage") for chunk in await events(client, stream_options=options))


class TestNames:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return dataclasses.replace(services, other_names=("gpt-4o-mini", "ORG/NAME"))

    async def test_every_name_is_served_and_answers_carry_the_first(self, address: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as official:
            names = [model.id async for model in official.models.list()]
            assert names == ["tiny", "gpt-4o-mini", "ORG/NAME"]
            for name in names:
                answer = await official.completions.create(model=name, prompt="hello", max_tokens=2)
                assert (answer.model, (await official.models.retrieve(name)).id) == ("tiny", name)
            with pytest.raises(openai.NotFoundError, match="serves 'tiny', 'gpt-4o-mini', 'ORG/NAME'"):
                await official.models.retrieve("other")
