"""OpenTelemetry spans of requests to generate, sent over OTLP: one for the request, and within it queue,
prefill and decode.

The module is imported only if an endpoint is given: its packages are the extra `otel`. Spans are made when a
request ends, from its record, so that tracing costs nothing before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from headway import __version__
from headway.server.base.errors import ApiError
from headway.server.requests.access import RequestRecord, error_param
from headway.server.requests.answer import Answer

EXPORT_SECONDS = 3.0  # a collector that does not answer must not hold up the server's end
PROVIDER = "headway"
OPERATIONS = {
    "completions": "text_completion",
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
}  # by endpoint, as the GenAI conventions name them
Phase = tuple[str, float, float]  # name, begin and end in monotonic seconds


class Tracing:
    """Mutable: owns the thread that sends spans in batches; `close` sends the rest."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "headway", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headway", __version__)

    def __call__(self, record: RequestRecord) -> None:
        """Makes the spans of a request to generate that has ended. A refused request has no phases."""
        if record.endpoint in OPERATIONS:
            _trace(self._tracer, record)

    def close(self) -> None:
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing:
    """endpoint: a collector's base URL, such as http://localhost:4318."""
    return Tracing(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS))


def _trace(tracer: Tracer, record: RequestRecord) -> None:
    unix_minus_monotonic = time.time_ns() - time.monotonic_ns()

    def nanoseconds(seconds: float) -> int:
        return int(seconds * 1e9) + unix_minus_monotonic

    span = tracer.start_span(
        f"{record.method} {record.path}",
        context=_caller(record.traceparent),
        kind=SpanKind.SERVER,
        start_time=nanoseconds(record.started_seconds),
        attributes=dict(_attributes(record)),
    )
    if (answer := record.answer) is not None:
        inside = set_span_in_context(span)
        for name, begin, end in _phases(answer):
            phase = tracer.start_span(name, context=inside, start_time=nanoseconds(begin))
            if name == "decode":
                phase.set_attributes(dict(_speculation(answer)))
            phase.end(nanoseconds(end))
    if (description := _failure(record)) is not None:
        span.set_status(Status(StatusCode.ERROR, description))
    span.end(nanoseconds(record.ended_seconds))


def _caller(traceparent: str | None) -> Context | None:
    if traceparent is None:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _phases(answer: Answer) -> Iterator[Phase]:
    """Yields the phases that the request reached. With several choices the queue ends when the last one
    was admitted, and prefill with the first token of any."""
    generation = answer.generation
    arrival, queued = generation.arrival_seconds, generation.queue_seconds
    first, last = generation.first_token_seconds, generation.last_token_seconds
    if queued is None or first is None or last is None:
        return
    yield "queue", arrival, arrival + queued
    yield "prefill", arrival + queued, arrival + max(first, queued)
    yield "decode", arrival + max(first, queued), arrival + max(last, queued)


def _failure(record: RequestRecord) -> str | None:
    """Returns the description of the span's error status. Answers of 4xx leave it unset, as the
    conventions demand of a server."""
    if record.answer is not None and record.answer.generation.error is not None:
        return str(record.answer.generation.error)
    return _error_type(record.error) if record.error is not None and record.error.status >= 500 else None


def _error_type(error: ApiError) -> str:
    return error.code or str(error.status)


def _attributes(record: RequestRecord) -> Iterator[tuple[str, AttributeValue]]:
    """Yields attributes under OpenTelemetry's names where there are any; never a text."""
    yield "gen_ai.operation.name", OPERATIONS[record.endpoint]
    yield "gen_ai.provider.name", PROVIDER
    yield "headway.request_id", record.request_id
    yield "http.request.method", record.method
    yield "url.path", record.path
    yield "http.response.status_code", record.status
    if record.error is None or record.error.code != "model_not_found":  # the name would be the client's
        yield "gen_ai.request.model", record.model
    if record.error is not None:
        yield "error.type", _error_type(record.error)
        if (param := error_param(record.error)) is not None:
            yield "headway.error_param", param
    if record.answer is not None:
        yield from _response(record.answer)


def _response(answer: Answer) -> Iterator[tuple[str, AttributeValue]]:
    yield "gen_ai.response.model", answer.head.model
    yield "gen_ai.response.id", answer.head.id
    yield "gen_ai.response.finish_reasons", answer.generation.outcomes
    yield "gen_ai.usage.input_tokens", answer.num_prompt_tokens
    yield "gen_ai.usage.output_tokens", answer.generation.counts().num_completion_tokens


def _speculation(answer: Answer) -> Iterator[tuple[str, AttributeValue]]:
    counts = answer.generation.counts()
    num_drafted = counts.num_accepted + counts.num_rejected
    yield "headway.drafted_tokens", num_drafted
    yield "headway.accepted_tokens", counts.num_accepted
    yield "headway.accepted_tokens_per_position", counts.accepted_per_position
    if num_drafted:
        yield "headway.acceptance_ratio", counts.num_accepted / num_drafted
