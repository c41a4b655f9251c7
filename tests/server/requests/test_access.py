"""One line a request, with ids, counts and times and without texts; each answer counted by its status."""

from __future__ import annotations

import ast
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine
from headway_testing.waiting import until
from prometheus_client.parser import text_string_to_metric_families

from headway.engine import INTERNAL_ERROR, QueueFullError
from headway.server.app import create_app
from headway.server.base.errors import CODES
from headway.server.http.guard import RequestIds
from headway.server.http.keys import Keys
from headway.server.requests.access import MAX_REMEMBERED, AccessLog, Probes
from headway.server.requests.services import Services

URL = "/v1/completions"
PROMPT = "the secret prompt"
GENERATED = {
    "id", "stream", "finish_reasons", "error", "prompt_tokens", "completion_tokens", "drafted_tokens",
    "accepted_tokens", "queue_seconds", "first_token_seconds",
}  # fmt: skip


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Reads the fields of the lines so far; those of quiet paths are debug."""
    caplog.set_level(logging.INFO, logger="headway.access")
    return lambda: [r.__dict__["fields"] for r in caplog.records if r.name == "headway.access"]


async def responses(client: httpx.AsyncClient, endpoint: str) -> dict[str, float]:
    """{status: how many}, without zeros."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [s for family in families for s in family.samples if s.name == "headway_http_responses_total"]
    found = {s.labels["status"]: s.value for s in samples if s.labels["endpoint"] == endpoint}
    return {status: count for status, count in found.items() if count}


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_completion_is_one_line_without_its_texts(
    client: httpx.AsyncClient, lines: Any, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 7, "n": 2, "stream": stream}
    answer = await client.post(URL, json=body, headers={"X-Request-Id": "mine"})
    (line,) = lines()
    assert line.keys() >= GENERATED
    told = {name: line[name] for name in (
        "request_id", "method", "path", "status", "stream", "finish_reasons", "error",
        "completion_tokens", "drafted_tokens", "accepted_tokens")}  # fmt: skip
    assert told == {
        "request_id": "mine", "method": "POST", "path": URL, "status": 200, "stream": stream,
        "finish_reasons": ["length", "length"], "error": None, "completion_tokens": 14,
        "drafted_tokens": 18, "accepted_tokens": 8,
    }  # fmt: skip
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert line["id"] in answer.text
    (text,) = [r.getMessage() for r in caplog.records if r.name == "headway.access"]
    assert "finish_reasons=length,length" in text
    assert PROMPT.split()[1] not in text + str(line)


async def test_a_refusal_is_a_line_without_a_generation(client: httpx.AsyncClient, lines: Any) -> None:
    await client.post(URL, json={"prompt": PROMPT, "max_tokens": 0})
    (line,) = lines()
    assert (line["status"], GENERATED & line.keys()) == (400, set())
    assert await responses(client, "completions") == {"400": 1}


async def test_probes_and_scrapes_are_not_told_unless_they_fail(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Any
) -> None:
    for path in ("/health", "/metrics", "/ready", "/load"):
        await client.get(path)
    assert lines() == []
    engine.state = "restarting"
    await client.get("/ready")
    assert [line["status"] for line in lines()] == [503]


PROBES = ("/", "/health", "/ping", "/health/generate", "/ready", "/load", "/metrics", "/version", "/dashboard", "/favicon.ico",
          "/dashboard/data")  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", PROBES)
async def test_a_probe_that_succeeds_is_debug(
    client: httpx.AsyncClient, lines: Any, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    assert (await client.request(method, path)).status_code < 400
    assert lines() == []
    caplog.set_level(logging.DEBUG, logger="headway.access")
    await client.request(method, path)
    assert [line["path"] for line in lines()] == [path]


async def test_a_probe_that_keeps_failing_is_told_when_that_begins_changes_and_ends(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Any
) -> None:
    for state in ("restarting", "restarting", "serving", "serving", "draining", "draining", "draining"):
        engine.state = state  # type: ignore[assignment]
        for method in ("GET", "HEAD"):
            await client.request(method, "/ready")
    assert [line["status"] for line in lines()] == [503, 200, 503]


async def test_other_requests_and_other_ways_to_fail_are_told_each_time(
    client: httpx.AsyncClient, lines: Any
) -> None:
    for method, path in (("POST", "/health"), ("GET", "/healthy"), ("GET", "/dashboard/nothing")):
        for _ in range(2):
            await client.request(method, path)
    assert [line["status"] for line in lines()] == [405, 405, 404, 404, 404, 404]


def test_a_probes_failure_is_news_once_for_each_client_and_way() -> None:
    probes = Probes()
    outcomes = [(200, None), (503, "a"), (503, "a"), (503, "b"), (401, "b"), (200, None), (200, None)]
    told = [probes.is_news("/load", "10.0.0.1", outcome) for outcome in outcomes]
    assert told == [False, True, False, True, True, True, False]
    assert probes.is_news("/load", "10.0.0.1", (401, "b"))
    assert not probes.is_news("/load", "10.0.0.2", (200, None))
    assert not probes.is_news("/load", "10.0.0.1", (401, "b"))


def test_failures_of_countless_clients_are_not_all_remembered() -> None:
    probes = Probes()
    for i in range(MAX_REMEMBERED + 10):
        probes.is_news("/load", str(i), (503, None))
    assert not probes.is_news("/load", str(MAX_REMEMBERED + 9), (503, None))
    assert probes.is_news("/load", "0", (503, None))


async def test_a_failed_stream_tells_what_ended_it(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Any
) -> None:
    engine.die_after = 3
    await client.post(URL, json={"prompt": PROMPT, "max_tokens": 50, "stream": True})
    (line,) = lines()
    assert (line["status"], line["finish_reasons"]) == (200, ["error"])
    assert "the engine ended" in line["error"]


@pytest.mark.parametrize(("stream", "status"), [(False, 499), (True, 200)], ids=["at-once", "stream"])
async def test_a_client_that_leaves_is_told_and_counted(
    address: str, engine: FakeEngine, lines: Any, stream: bool, status: int
) -> None:
    engine.stall_after = 3
    body = {"prompt": PROMPT, "max_tokens": 50, "stream": stream}
    async with httpx.AsyncClient(base_url=address) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(URL, json=body, timeout=httpx.Timeout(30, read=0.5))
        await until(lambda: bool(lines()))
        (line,) = lines()
        assert (line["status"], line["finish_reasons"], line["error"]) == (status, ["abort"], None)
        assert await responses(client, "completions") == {str(status): 1}


async def test_answers_are_counted_by_endpoint_and_status(client: httpx.AsyncClient) -> None:
    await client.post(URL, json={"prompt": PROMPT})
    await client.post("/v1/chat/completions", json={"messages": []})
    await client.get("/nowhere")
    assert await responses(client, "completions") == {"200": 1}
    assert await responses(client, "chat") == {"400": 1}
    assert (await responses(client, "other"))["404"] == 1


async def test_a_path_cannot_write_lines_of_its_own(
    client: httpx.AsyncClient, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await client.get("/x%0AINFO%20headway.access:%20request_id=forged")
    assert [line["status"] for line in lines()] == [404]
    (text,) = [r.getMessage() for r in caplog.records if r.name == "headway.access"]
    assert "\n" not in text
    assert "path='/x\\nINFO headway.access: request_id=forged'" in text


ERRORS = {
    "unserved": ("POST", URL, {"prompt": PROMPT, "structural_tag": {"a": PROMPT}}, "unsupported_parameter", "structural_tag"),
    "range": ("POST", URL, {"prompt": PROMPT, "temperature": 3.5}, "invalid_value", "temperature"),
    "type": ("POST", URL, {"prompt": PROMPT, "n": "secret"}, "invalid_type", "n"),
    "unknown": ("POST", URL, {"prompt": PROMPT, "max_tokenz": 1}, "unknown_parameter", "max_tokenz"),
    "text-as-name": ("POST", URL, {"prompt": PROMPT, "stop ": PROMPT}, "unknown_parameter", None),
    "nested": (
        "POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT, "tools": [1]}]},
        "unsupported_parameter", "messages[0].tools",
    ),
    "model": ("POST", URL, {"prompt": PROMPT, "model": "secret"}, "model_not_found", "model"),
    "context": ("POST", URL, {"prompt": PROMPT * 4000}, "context_length_exceeded", "prompt"),
    "not-json": ("POST", URL, PROMPT, "invalid_type", None),
    "no-prompt": ("POST", URL, {"prompt": []}, "invalid_value", "prompt"),
    "no-ids": ("POST", URL, {"prompt": [[]]}, "invalid_value", "prompt"),
    "mixed": ("POST", URL, {"prompt": ["a", 1]}, "invalid_value", "prompt"),
    "path": ("GET", "/nowhere", None, "not_found", None),
    "method": ("DELETE", URL, None, "method_not_allowed", None),
    "endpoint": ("POST", "/v1/embeddings", {}, "unsupported_endpoint", None),
}  # fmt: skip


async def errors(client: httpx.AsyncClient) -> dict[str, float]:
    """{code: how many}, without zeros."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [s for family in families for s in family.samples if s.name == "headway_http_errors_total"]
    return {s.labels["code"]: s.value for s in samples if s.value}


@pytest.mark.parametrize(("method", "path", "body", "code", "param"), ERRORS.values(), ids=ERRORS)
async def test_a_refusal_tells_and_counts_its_code_and_field_without_a_value(
    client: httpx.AsyncClient, lines: Any, caplog: pytest.LogCaptureFixture,
    method: str, path: str, body: object, code: str, param: str | None,
) -> None:  # fmt: skip
    answer = await client.request(method, path, json=body)
    assert answer.json()["error"]["code"] == code
    (line,) = lines()
    assert (line["error_code"], line["error_param"]) == (code, param)
    (text,) = [r.getMessage() for r in caplog.records if r.name == "headway.access"]
    assert f"error_code={code}" in text
    assert "secret" not in text
    assert await errors(client) == {code: 1}


async def test_what_the_guard_refuses_tells_and_counts_its_code(services: Services, lines: Any) -> None:
    app = create_app(replace(services, keys=Keys(("right",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        await client.post(URL, json={"prompt": PROMPT})
        await client.post(URL, headers={"X-Long": "a" * 70_000})
        assert [line["error_code"] for line in lines()] == ["invalid_api_key", "headers_too_large"]
        found = {"invalid_api_key": 1, "headers_too_large": 1}
        assert await errors(client) == found


async def test_faults_and_full_queues_tell_and_count_their_code(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {
        "queue_full": QueueFullError("full", code="queue_full"),
        "internal_error": ValueError("secret"),
    }
    for error in failures.values():
        monkeypatch.setattr(engine, "submit", Mock(side_effect=error))
        await client.post(URL, json={"prompt": PROMPT})
    assert [line["error_code"] for line in lines()] == [*failures]
    assert await errors(client) == dict.fromkeys(failures, 1)


async def test_an_error_in_a_stream_tells_and_counts_its_code(
    client: httpx.AsyncClient, engine: FakeEngine, lines: Any
) -> None:
    engine.die_after = 3
    await client.post(URL, json={"prompt": PROMPT, "max_tokens": 50, "stream": True})
    (line,) = lines()
    assert (line["status"], line["error_code"]) == (200, "engine_unavailable")
    assert await errors(client) == {"engine_unavailable": 1}


async def test_what_succeeds_has_no_error_code(client: httpx.AsyncClient, lines: Any) -> None:
    await client.post(URL, json={"prompt": PROMPT})
    (line,) = lines()
    assert "error_code" not in line
    assert await errors(client) == {}


def test_the_codes_of_the_counter_are_those_of_the_code() -> None:
    root = Path(__file__).parents[3]
    sources = (path.read_text() for part in ("server", "engine") for path in (root / part).rglob("*.py"))
    trees = [ast.parse(source) for source in sources if "code=" in source]
    keywords = (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.keyword) and n.arg == "code")
    found = {
        k.value.value for k in keywords if isinstance(k.value, ast.Constant) and k.value.value is not None
    }
    assert found | {INTERNAL_ERROR} == set(CODES)
    assert len(set(CODES)) == len(CODES)


@pytest.mark.parametrize(
    ("ignored", "told"),
    [
        ([], None),
        (["transforms", "tools[0].strict", "transforms"], "transforms, tools[0].strict"),
        (["no name\r\nX-Evil: 1"], None),
        (
            ["tools[1].server_url", "tools[1]", "tools[10].x", "text.a.b", "text.a"],
            "tools[1], tools[10].x, text.a",
        ),
        ([f"f{i}" for i in range(100)], ", ".join(f"f{i}" for i in range(32))),
    ],
)
async def test_a_header_tells_what_was_ignored(ignored: list[str], told: str | None) -> None:
    async def route(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["record"].ignored += ignored
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    logged = AccessLog(route, Mock(), "model")
    transport = httpx.ASGITransport(RequestIds(logged))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(URL)
    assert answer.headers.get("x-headway-ignored") == told
