"""Other spellings of paths: the same routes, keys and counters, whatever the client writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from headway.server.app import create_app
from headway.server.http.keys import Keys
from headway.server.http.paths import ALIASES, FIXED_PATHS, canonical_path
from headway.server.requests.services import Services
from headway.server.routes.openapi import OPERATIONS

COMPLETION = {"prompt": "abc", "max_tokens": 3}
POSTS: dict[str, dict[str, object]] = {
    "/v1/completions": COMPLETION, "/completions": COMPLETION, "/tokenize": {"prompt": "abc"},
    "/v1/tokenize": {"prompt": "abc"}, "/detokenize": {"tokens": [1]}, "/v1/detokenize": {"tokens": [1]},
}  # fmt: skip
GETS = (
    "/v1/models",
    "/models",
    "/v1/models/tiny",
    "/models/tiny",
    "/v1/speculation",
    "/health",
    "/ready",
    "/metrics",
)


async def counts(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    """{(endpoint, status): how many} of completions and chat, without zeros."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [s for family in families for s in family.samples if s.name == "headway_http_responses_total"]
    found = {(s.labels["endpoint"], s.labels["status"]): s.value for s in samples if s.value}
    return {key: count for key, count in found.items() if key[0] != "other"}


@pytest.mark.parametrize("slash", ["", "/"], ids=["plain", "slash"])
@pytest.mark.parametrize("path", POSTS)
async def test_a_post_path_has_aliases(client: httpx.AsyncClient, path: str, slash: str) -> None:
    answer = await client.post(path + slash, json=POSTS[path])
    assert answer.status_code == 200, answer.text
    expected = {("completions", "200"): 1} if "completions" in path else {}
    assert await counts(client) == expected


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions/", "/chat/completions/"])
async def test_chats_are_counted_as_chats(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"messages": [{"role": "user", "content": "a"}]})
    assert answer.json()["error"]["code"] == "chat_not_supported"
    assert await counts(client) == {("chat", "400"): 1}


@pytest.mark.parametrize("path", GETS)
async def test_a_get_path_has_aliases(client: httpx.AsyncClient, path: str) -> None:
    answers = [await client.get(path + slash) for slash in ("", "/") if slash == "" or "tiny" not in path]
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    if "models" in path:
        expected = (await client.get(path.replace("/v1/", "/").replace("/models", "/v1/models"))).json()
        assert [answer.json() for answer in answers] == [expected] * len(answers)


async def test_a_stream_and_a_wrong_method_have_aliases(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completions/", json=COMPLETION | {"stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    refused = await client.get("/completions/")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


async def test_other_paths_stay_404(client: httpx.AsyncClient) -> None:
    for path in ("/completions//", "/v1/completions/x", "/tokenizer"):
        assert (await client.post(path, json=COMPLETION)).status_code == 404


async def test_ping_is_health_without_a_key(services: Services, engine: FakeEngine) -> None:
    app = create_app(replace(services, keys=Keys(("right",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        for state, status in (("serving", 200), ("restarting", 503)):
            engine.state = state  # type: ignore[assignment]
            answers = [await client.get(path) for path in ("/ping", "/ping/", "/health")]
            assert [answer.status_code for answer in answers] == [status] * 3
            assert (await client.head("/ping")).status_code == status
        for path, body in POSTS.items():
            assert (await client.post(path, json=body)).status_code == 401


async def test_an_alias_is_the_path_of_its_line(client: httpx.AsyncClient, caplog: Any) -> None:
    caplog.set_level("INFO", logger="headway.access")
    await client.post("/completions/", json=COMPLETION)
    (record,) = [record for record in caplog.records if record.name == "headway.access"]
    assert record.fields["path"] == "/v1/completions"


def test_aliases_lead_to_routes_that_are_described_once() -> None:
    described = {operation.path for operation in OPERATIONS}
    assert set(ALIASES.values()) <= described
    assert not set(ALIASES) & described
    assert {path for path in described if "{" not in path} <= FIXED_PATHS
    assert all(canonical_path(path) == path for path in described | {"/", "/dashboard/page.js"})
