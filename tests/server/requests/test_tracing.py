"""The spans of a request: one around queue, prefill and decode, under the caller's trace, and without
texts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
from headway_testing.fake_engine import FakeEngine
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from headway.engine import ConfigError
from headway.server.app import create_app
from headway.server.cli.serve import _open_tracing
from headway.server.requests.services import Services
from headway.server.requests.tracing import Tracing

URL = "/v1/completions"
BODY = {"prompt": "the secret prompt", "max_tokens": 7}
TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


class Spans:
    """What was exported, once tracing is closed; closing sends it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(self._exporter)

    def by_name(self) -> dict[str, ReadableSpan]:
        self.tracing.close()
        spans = self._exporter.get_finished_spans()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
async def client(services: Services, spans: Spans) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(services, trace=spans.tracing)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_queue_prefill_and_decode_follow_one_another_in_the_request(
    client: httpx.AsyncClient, engine: FakeEngine, spans: Spans, stream: bool
) -> None:
    engine.round_seconds = engine.queue_seconds = 0.01
    await client.post(URL, json=BODY | {"stream": stream})
    found = spans.by_name()
    request, phases = found[f"POST {URL}"], [found[name] for name in ("queue", "prefill", "decode")]
    assert request.start_time is not None
    times = [request.start_time, *(t for p in phases for t in (p.start_time, p.end_time)), request.end_time]
    assert times == sorted(times)  # type: ignore[type-var]
    assert [phase.parent.span_id for phase in phases if phase.parent] == [request.context.span_id] * 3
    assert phases[0].end_time - phases[0].start_time == pytest.approx(1e7)  # type: ignore[operator]
    assert phases[2].end_time - phases[2].start_time > 1.5e7  # type: ignore[operator]


async def test_spans_tell_counts_and_acceptance_and_no_text(client: httpx.AsyncClient, spans: Spans) -> None:
    await client.post(URL, json=BODY, headers={"X-Request-Id": "mine"})
    found = spans.by_name()
    request, decode = found[f"POST {URL}"].attributes, found["decode"].attributes
    assert request is not None
    assert decode is not None
    expected = {
        "http.response.status_code": 200, "gen_ai.request.model": "tiny", "headway.request_id": "mine",
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.output_tokens": 7,
    }  # fmt: skip
    assert request.items() >= expected.items()
    assert dict(decode) == {
        "headway.drafted_tokens": 9, "headway.accepted_tokens": 4, "headway.acceptance_ratio": 4 / 9,
        "headway.accepted_tokens_per_position": (2, 2),
    }  # fmt: skip
    assert "secret" not in "".join(span.to_json() for span in found.values())


async def test_a_callers_trace_goes_on(client: httpx.AsyncClient, spans: Spans) -> None:
    await client.post(URL, json=BODY, headers={"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"})
    request = spans.by_name()[f"POST {URL}"]
    assert request.parent is not None
    assert (request.context.trace_id, request.parent.span_id) == (TRACE, PARENT)


async def test_a_fault_is_the_status_of_the_span(
    client: httpx.AsyncClient, engine: FakeEngine, spans: Spans
) -> None:
    engine.die_after = 3
    await client.post(URL, json=BODY | {"stream": True})
    span = spans.by_name()[f"POST {URL}"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "engine_unavailable"


async def test_a_server_that_is_not_ready_is_the_status_of_the_span(
    client: httpx.AsyncClient, engine: FakeEngine, spans: Spans
) -> None:
    engine.info = None
    await client.post(URL, json=BODY)
    span = spans.by_name()[f"POST {URL}"]
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "engine_unavailable")


async def test_what_is_no_request_to_generate_has_no_span(client: httpx.AsyncClient, spans: Spans) -> None:
    await client.get("/health")
    await client.get("/nowhere")
    await client.post("/tokenize", json={"prompt": 1})
    assert spans.by_name() == {}


@pytest.mark.parametrize(
    ("path", "operation"), [(URL, "text_completion"), ("/v1/chat/completions", "chat")], ids=["text", "chat"]
)
async def test_a_refused_request_is_a_span_that_says_why(
    client: httpx.AsyncClient, spans: Spans, path: str, operation: str
) -> None:
    trace = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
    await client.post(path, json={"structural_tag": {"a": "secret"}, "model": "tiny"}, headers=trace)
    (span,) = spans.by_name().values()
    assert (span.name, span.context.trace_id) == (f"POST {path}", TRACE)
    expected = {
        "gen_ai.operation.name": operation, "gen_ai.provider.name": "headway", "gen_ai.request.model": "tiny",
        "http.response.status_code": 400, "error.type": "unsupported_parameter", "headway.error_param": "structural_tag",
    }  # fmt: skip
    assert span.attributes is not None
    assert span.attributes.items() >= expected.items()
    assert span.status.status_code is StatusCode.UNSET
    assert "secret" not in span.to_json()


async def test_a_wrong_models_name_is_in_no_span(client: httpx.AsyncClient, spans: Spans) -> None:
    await client.post(URL, json=BODY | {"model": "secret"})
    (span,) = spans.by_name().values()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "model_not_found"
    assert "secret" not in span.to_json()


async def test_a_span_names_the_model_by_the_name_that_the_request_used(
    services: Services, spans: Spans
) -> None:
    app = create_app(replace(services, other_names=("alias",)), trace=spans.tracing)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        await client.post(URL, json=BODY | {"model": "alias"})
    attributes = spans.by_name()[f"POST {URL}"].attributes
    assert attributes is not None
    assert (attributes["gen_ai.request.model"], attributes["gen_ai.response.model"]) == ("alias", "tiny")


def test_without_an_endpoint_nothing_is_imported() -> None:
    assert _open_tracing(None) is None


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headway.server.requests.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*pip install -e '\.\[otel\]'"):
        _open_tracing("http://localhost:4318")


async def test_spans_reach_a_collector(services: Services) -> None:
    """A real HTTP exporter; the collector counts what comes to its path."""
    paths: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        tracing = _open_tracing(f"http://127.0.0.1:{server.server_port}/")
        assert tracing is not None
        transport = httpx.ASGITransport(create_app(services, trace=tracing))
        async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
            await client.post(URL, json=BODY)
        await asyncio.to_thread(tracing.close)
        server.shutdown()
        thread.join()
    assert paths == ["/v1/traces"]
