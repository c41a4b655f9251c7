"""The prefix cache between API keys: a key finds its own prefixes alone."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from headway_testing.fake_chat import FakeChat
from headway_testing.fake_engine import FakeEngine

from headway.server.app import create_app
from headway.server.base.conversation import Conversation
from headway.server.http.keys import Keys
from headway.server.requests.services import Services

URL = "/v1/completions"


class OneWordChat(FakeChat):
    async def render(self, conversation: Conversation) -> str:
        return "word"


def connect(services: Services, keys: Keys) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(replace(services, keys=keys, chat=OneWordChat())))
    return httpx.AsyncClient(transport=transport, base_url="http://headway")


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_keys_share_no_prefixes(services: Services, engine: FakeEngine, url: str) -> None:
    """A prompt that another key has sent must not be told by how fast the answer comes."""
    asked = {"prompt": [1, 2]} if url == URL else {"messages": [{"role": "user", "content": "x"}]}

    async def salts(client: httpx.AsyncClient, key: str, **fields: str) -> set[str]:
        engine.submitted.clear()
        answer = await client.post(
            url, json={**asked, "max_tokens": 1, "n": 2, **fields}, headers={"Authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200, answer.text
        return {submitted.cache_salt for submitted in engine.submitted}

    wishes: list[dict[str, str]] = [{}, {"cache_salt": "s"}]
    async with connect(services, Keys(("one", "two"), "admin")) as client:
        seen = [await salts(client, key, **wish) for key in ("one", "two", "admin") for wish in wishes]
        (own,), (other,) = seen[0], seen[2]
        forged = await salts(client, "one", cache_salt=other)
        assert await salts(client, "one") == {own}
    assert len(set().union(*seen, forged)) == 7
    assert not any(key in salt for group in seen for salt in group for key in ("one", "two", "admin"))
    async with connect(services, Keys()) as client:
        assert await salts(client, "one") == await salts(client, "two") == {""}
