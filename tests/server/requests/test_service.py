"""What surrounds a generation: ids, keys, limits, timeouts, comments in silent streams, aborts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from headway_testing.fake_engine import FakeEngine
from headway_testing.waiting import until

from headway.engine import DraftCheck, EngineStats
from headway.server.app import create_app
from headway.server.base.config import ServiceLimits
from headway.server.generation.in_flight import InFlight
from headway.server.http.keys import Keys
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 30}
Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def connect(services: Services) -> Connect:
    """A client of an app with other services."""

    @asynccontextmanager
    async def connect(cors_origins: tuple[str, ...] = (), **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(replace(services, **changes), cors_origins=cors_origins)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
            yield client

    return connect


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class TestRequestIds:
    @pytest.mark.parametrize("path", ["/version", "/nonsense", URL], ids=["good", "missing", "wrong-method"])
    async def test_a_clients_id_comes_back(self, client: httpx.AsyncClient, path: str) -> None:
        response = await client.get(path, headers={"X-Request-Id": "abc-123"})
        assert response.headers["x-request-id"] == "abc-123"

    @pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "ü"], ids=str)
    async def test_an_unusable_id_is_replaced(self, client: httpx.AsyncClient, given: str | None) -> None:
        headers = {} if given is None else {"X-Request-Id": given.encode()}
        ids = [(await client.get("/version", headers=headers)).headers["x-request-id"] for _ in range(2)]
        assert all(i.startswith("req-") for i in ids)
        assert len(set(ids)) == 2

    async def test_faults_of_our_own_have_one_too(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.submit = lambda requests: 1 / 0  # type: ignore[method-assign]
        response = await client.post(URL, json=BODY, headers={"X-Request-Id": "mine"})
        assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")


class TestKeys:
    KEYS = Keys(("one", "two"), "admin")

    @pytest.mark.parametrize("key", ["one", "two", "admin"])
    async def test_every_key_opens_the_api(self, connect: Connect, key: str) -> None:
        async with connect(keys=self.KEYS) as client:
            assert (await client.post(URL, json=BODY, headers=bearer(key))).status_code == 200

    @pytest.mark.parametrize(
        "headers", [{}, bearer("three"), bearer(""), {"Authorization": "one"}, {"Authorization": "Basic one"}],
        ids=["none", "wrong", "empty", "no-scheme", "basic"],
    )  # fmt: skip
    @pytest.mark.parametrize("path", [URL, "/v1/models", "/tokenize", "/load", "/nonsense"])
    async def test_no_other_key_does(self, connect: Connect, headers: dict[str, str], path: str) -> None:
        async with connect(keys=self.KEYS) as client:
            response = await client.post(path, json=BODY, headers=headers)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"]["type"] == "authentication_error"

    @pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
    async def test_probes_need_none(self, connect: Connect, path: str) -> None:
        async with connect(keys=self.KEYS) as client:
            assert (await client.get(path)).status_code == 200

    @pytest.mark.parametrize(
        ("keys", "key", "status"),
        [(KEYS, "one", 401), (KEYS, "admin", 404), (Keys(), "", 403), (Keys((), "admin"), "", 401)],
        ids=["api-key", "admin-key", "no-admin-key-set", "none-given"],
    )
    async def test_an_abort_needs_the_admin_key(
        self, connect: Connect, keys: Keys, key: str, status: int
    ) -> None:
        async with connect(keys=keys) as client:
            response = await client.post("/abort/x", headers=bearer(key))
        assert response.status_code == status
        assert response.json()["error"]["code"]


class TestCors:
    HEADERS = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}  # noqa: RUF012

    async def test_a_page_of_the_origin_may_ask_also_for_errors(self, connect: Connect) -> None:
        async with connect(("http://page",), keys=Keys(("k",))) as client:
            before = await client.options(URL, headers=self.HEADERS)
            refused = await client.post(URL, json=BODY, headers=self.HEADERS)
        assert before.status_code == 200
        assert refused.status_code == 401
        for response in (before, refused):
            assert response.headers["access-control-allow-origin"] == "http://page"

    async def test_other_pages_may_not(self, connect: Connect, client: httpx.AsyncClient) -> None:
        async with connect(("http://other",)) as allowing:
            assert (await allowing.options(URL, headers=self.HEADERS)).status_code == 400
        response = await client.post(URL, json=BODY, headers=self.HEADERS)
        assert "access-control-allow-origin" not in response.headers


async def test_too_large_headers_are_431(client: httpx.AsyncClient) -> None:
    response = await client.get("/version", headers={"X-Large": "x" * 70_000})
    assert response.status_code == 431
    assert "65536" in response.json()["error"]["message"]


async def test_the_limit_on_bodies_is_the_servers(connect: Connect) -> None:
    async with connect(limits=ServiceLimits(max_body_bytes=60)) as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
        assert (await client.post(URL, json={**BODY, "user": "x" * 60})).status_code == 413


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_request_that_takes_too_long_fails_and_is_aborted(
    connect: Connect, engine: FakeEngine, stream: bool
) -> None:
    engine.stall_after = 6
    async with connect(limits=ServiceLimits(request_seconds=0.1)) as client:
        response = await client.post(URL, json={**BODY, "n": 2, "stream": stream})
    assert response.status_code == (200 if stream else 504)
    assert response.headers.get("x-should-retry") == (None if stream else "false")
    error = json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert error["code"] == "request_timeout"
    assert "0.1 s" in error["message"]
    assert sorted(engine.aborted) == [0, 1]


async def test_a_request_in_time_is_untouched(connect: Connect, engine: FakeEngine) -> None:
    async with connect(limits=ServiceLimits(request_seconds=5.0)) as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
    assert engine.aborted == []


@pytest.mark.parametrize("stall_after", [0, 6], ids=["before-the-first-token", "in-the-middle"])
async def test_a_silent_stream_gets_comments(connect: Connect, engine: FakeEngine, stall_after: int) -> None:
    engine.stall_after = stall_after
    limits = ServiceLimits(request_seconds=0.5, keep_alive_seconds=0.1)
    async with connect(limits=limits) as client:
        lines = (await client.post(URL, json={**BODY, "stream": True})).text.split("\n\n")
    assert lines.count(": keep-alive") in (3, 4, 5)
    assert "request_timeout" in lines[-2]
    assert len([line for line in lines if '"text"' in line]) == stall_after // 3


async def test_a_busy_stream_gets_none(connect: Connect, engine: FakeEngine) -> None:
    engine.round_seconds = 0.03
    async with connect(limits=ServiceLimits(keep_alive_seconds=0.2)) as client:
        response = await client.post(URL, json={**BODY, "stream": True})
    assert "keep-alive" not in response.text


class TestAborts:
    @pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
    @pytest.mark.parametrize(
        ("name", "path"),
        [("mine", "/abort/mine"), ("team/7", "/abort/team/7"), ("/a?", "/abort/%2Fa%3F")],
        ids=["plain", "slash", "escaped"],
    )
    async def test_an_operator_ends_a_request_by_its_id(
        self, connect: Connect, engine: FakeEngine, name: str, path: str, stream: bool
    ) -> None:
        engine.stall_after = 6
        async with connect(keys=Keys((), "admin")) as client:
            headers = {"X-Request-Id": name}
            post = asyncio.create_task(client.post(URL, json={**BODY, "stream": stream}, headers=headers))
            await until(lambda: bool(engine.running))
            await asyncio.sleep(0.05)
            done = await client.post(path, headers=bearer("admin"))
            assert done.json() == {"id": name, "num_aborted": 1}
            response = await post
            again = await client.post(path, headers=bearer("admin"))
        assert again.status_code == 404
        assert response.status_code == (200 if stream else 410)
        error = json.loads(response.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
        assert error["code"] == "aborted"
        assert not engine.running


class TestPause:
    KEYS = Keys((), "admin")

    async def test_the_admin_key_holds_tokens_back_and_lets_them_go(
        self, connect: Connect, engine: FakeEngine
    ) -> None:
        async with connect(keys=self.KEYS) as client:
            assert (await client.post("/pause")).status_code == 401
            told = await client.post("/pause", headers=bearer("admin"))
            assert told.json() == {"state": "paused", "num_requests": 0}
            post = asyncio.create_task(client.post(URL, json=BODY))
            await until(lambda: len(engine.running) == 1)
            await asyncio.sleep(0.05)
            ready, load = await client.get("/ready"), await client.get("/load")
            assert not post.done()
            assert (await client.post("/resume")).status_code == 401
            told = await client.post("/resume", headers=bearer("admin"))
            assert told.json() == {"state": "serving", "num_requests": 1}
            assert (await post).json()["usage"]["completion_tokens"] == 30
            assert (await client.get("/ready")).status_code == 200
        assert (ready.status_code, ready.json()["reason"]) == (503, "paused")
        assert (load.json()["state"], load.json()["num_requests"]) == ("paused", 1)

    async def test_the_time_of_a_request_runs_on(self, connect: Connect, engine: FakeEngine) -> None:
        engine.pause()
        async with connect(limits=ServiceLimits(request_seconds=0.1)) as client:
            response = await client.post(URL, json=BODY)
        assert response.status_code == 504
        assert engine.aborted == [0]

    async def test_the_probe_says_so_at_once(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.pause()
        response = await client.get("/health/generate")
        assert response.status_code == 503
        assert "paused" in response.json()["error"]["message"]
        assert engine.submitted == []


class TestLoad:
    async def test_load_counts_what_runs_and_what_waits(self, connect: Connect, engine: FakeEngine) -> None:
        engine.stats = EngineStats(
            num_requests_running=2, num_requests_waiting=1, num_kv_blocks=64, num_kv_blocks_used=16
        )
        engine.stall_after = 0
        async with connect(running=InFlight()) as client:
            post = asyncio.create_task(client.post(URL, json={"prompt": [[1] * 7, [2] * 5]}))
            await until(lambda: len(engine.running) == 2)
            busy = (await client.get("/load")).json()
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
            idle = (await client.get("/load")).json()
        assert busy == {
            "state": "serving", "num_requests": 1, "num_waiting_tokens": 12, "num_rows_running": 2, "num_rows_waiting": 1,
            "kv_cache_usage_ratio": 0.25,
        }  # fmt: skip
        assert (idle["num_requests"], idle["num_waiting_tokens"]) == (0, 0)


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("keys", "key"),
    [(Keys(), ""), (Keys((), "admin"), ""), (Keys(("one",), "admin"), "one")],
    ids=["no-admin-key-set", "none-given", "api-key"],
)
async def test_nobody_without_the_admin_key_goes_before_all_others(
    connect: Connect, engine: FakeEngine, url: str, keys: Keys, key: str
) -> None:
    asked = {"prompt": [1]} if url == URL else {"messages": [{"role": "user", "content": "x"}]}
    async with connect(keys=keys) as client:
        answer = await client.post(url, json={**asked, "priority": -1}, headers=bearer(key) if key else {})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (403, "priority", "priority_not_allowed")
    assert engine.submitted == []


async def test_who_has_the_admin_key_goes_before_all_others(connect: Connect, engine: FakeEngine) -> None:
    async with connect(keys=Keys((), "admin")) as client:
        answer = await client.post(URL, json={**BODY, "priority": -1000}, headers=bearer("admin"))
    assert answer.status_code == 200
    assert [s.priority for s in engine.submitted] == [-1000]


async def test_the_priority_goes_to_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for priority in (None, 0, 7, 2**31 - 1):
        assert (await client.post(URL, json={**BODY, "priority": priority})).status_code == 200
    assert [s.priority for s in engine.submitted] == [0, 0, 7, 2**31 - 1]
    refused = await client.post(URL, json={**BODY, "priority": 2**31})
    assert refused.json()["error"]["param"] == "priority"


class TestSpeculation:
    async def test_the_state_tells_limits_and_acceptance(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.stats = EngineStats(
            draft_tokens_per_position=[30, 20, 0], accepted_tokens_per_position=[24, 5, 0],
            row_rounds_by_emitted_tokens={1: 6, 2: 19, 3: 5},
        )  # fmt: skip
        assert (await client.get("/v1/speculation")).json() == {
            "has_mtp": True, "drafter": "mtp", "depth": 3, "chooses_depth": False, "max_draft_tokens": 3, "drafted_per_position": [30, 20, 0],
            "accepted_per_position": [24, 5, 0], "acceptance_per_position": [0.8, 0.25, None],
            "acceptance_length": 59 / 30,
            "check": {"state": "none", "acceptance": [], "chance": None, "num_sure": 0, "num_sure_accepted": 0, "reason": "", "seconds": 0.0},
        }  # fmt: skip

    async def test_a_head_that_failed_its_check_drafts_nothing_unless_an_operator_says_so(
        self, connect: Connect, engine: FakeEngine
    ) -> None:
        check = DraftCheck(state="failed", acceptance=[0.01, 0.0, 0.0], chance=0.1, reason="1% were accepted")
        assert engine.info is not None
        engine.info = msgspec.structs.replace(engine.info, draft_check=check)
        async with connect(keys=Keys((), "admin")) as client:
            told = (await client.get("/v1/speculation")).json()
            assert (told["max_draft_tokens"], told["depth"]) == (0, 3)
            assert told["check"]["reason"] == "1% were accepted"
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["is_ready"]) == (200, True)
            off = ["the drafter failed its check, speculation is off: 1% were accepted"]
            on = ["the drafter failed its check, it drafts because a limit was set: 1% were accepted"]
            assert ready.json()["warnings"] == off
            for limit, depth, warnings in ((2, 2, on), (None, 0, off)):
                body = {"max_draft_tokens": limit}
                answer = await client.put("/v1/speculation", json=body, headers=bearer("admin"))
                assert answer.json()["max_draft_tokens"] == depth
                assert (await client.get("/ready")).json()["warnings"] == warnings
                assert engine.lasting_depth == limit
        assert engine.depths == [2, 0]

    async def test_the_limit_holds_for_every_round_until_it_is_lifted(
        self, connect: Connect, engine: FakeEngine
    ) -> None:
        async with connect(keys=Keys((), "admin")) as client:
            assert (await client.put("/v1/speculation", json={"max_draft_tokens": 1})).status_code == 401
            headers = bearer("admin")
            for limit in (1, None):
                answer = await client.put(
                    "/v1/speculation", json={"max_draft_tokens": limit}, headers=headers
                )
                assert answer.json()["max_draft_tokens"] == (3 if limit is None else limit)
                for own in (None, 0, 2):
                    await client.post(URL, json={**BODY, "speculation": {"max_draft_tokens": own}})
            for wrong in (4, -1, "x"):
                answer = await client.put(
                    "/v1/speculation", json={"max_draft_tokens": wrong}, headers=headers
                )
                assert answer.status_code == 400
        assert engine.depths == [1, 3]
        assert [s.max_draft_tokens for s in engine.submitted] == [None, 0, 2] * 2


class TestTokens:
    async def test_text_becomes_ids_and_comes_back(
        self, client: httpx.AsyncClient, tokenizer: Tokenizer
    ) -> None:
        text = "naïve 😀<|endoftext|>"
        tokens = (await client.post("/tokenize", json={"prompt": text})).json()
        assert tokens["tokens"] == tokenizer.encode(text)
        assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 256)
        assert tokens["token_strs"][-1] == "<|endoftext|>"
        assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json() == {
            "prompt": text
        }
        body = {"tokens": tokens["tokens"], "skip_special_tokens": True}
        assert (await client.post("/detokenize", json=body)).json() == {"prompt": "naïve 😀"}

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("tokenize", {}, "prompt"), ("tokenize", {"prompt": "a", "messages": []}, "prompt"), ("tokenize", {"prompt": 1}, "prompt"),
            ("tokenize", {"messages": [{"role": "user", "content": "x"}]}, "model"), ("detokenize", {"tokens": [600]}, "tokens"),
            ("detokenize", {"tokens": [-1]}, "tokens"), ("detokenize", {"tokens": "a"}, "tokens"), ("detokenize", {}, "tokens"),
        ],
        ids=lambda value: None if isinstance(value, dict) else value,
    )  # fmt: skip
    async def test_what_is_wrong_is_named(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
    ) -> None:
        response = await client.post(f"/{path}", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


class TestProbe:
    async def test_health_generate_makes_one_token(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        response = await client.get("/health/generate")
        assert response.status_code == 200
        assert response.json()["seconds"] >= 0
        assert engine.submitted[0].max_tokens == 1

    async def test_health_generate_is_503_when_no_token_comes(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headway.server.routes.ops.PROBE_SECONDS", 0.1)
        engine.stall_after = 0
        response = await client.get("/health/generate")
        assert response.status_code == 503
        assert engine.aborted == [0]
