"""Routes for operators and probes: /health and /ping (liveness; /health/generate tests it), /ready, /load,
/version, /metrics."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import asdict

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headway import __version__
from headway.engine import EngineDeadError, EngineInfo, Phase, SamplingParams
from headway.server.engine.client import State
from headway.server.generation.choice import ChoiceRequest
from headway.server.generation.generation import Generation
from headway.server.http.json_response import JsonResponse
from headway.server.requests.services import Services, engine_info, max_draft_tokens, services_of
from headway.server.telemetry.history import kv_cache_usage

router = APIRouter()
PROBE_SECONDS = 10.0


class Health(msgspec.Struct, omit_defaults=True):
    """is_alive: the engine gives signs of life in time, while it loads and while it serves, and its last
    starts did not all fail. num_failed_starts (in a row), and failure, the reason why the engine ended
    last, are present only while it does not serve."""

    is_alive: bool
    state: State
    phase: Phase
    progress: float
    step: int
    heartbeat_age_seconds: float | None
    num_restarts: int
    num_failed_starts: int = 0
    failure: str | None = None


class Probe(msgspec.Struct):
    seconds: float


class Load(msgspec.Struct):
    """num_requests: HTTP requests that generate; each may have several rows, one for each choice.

    num_waiting_tokens: prompt tokens of choices that have no token yet.
    """

    state: State
    num_requests: int
    num_waiting_tokens: int
    num_rows_running: int
    num_rows_waiting: int
    kv_cache_usage_ratio: float


class Readiness(msgspec.Struct):
    """tool_format: the form in which the model calls tools and reasons; plain if it is unknown. warnings:
    faults that an operator should repair, though requests are served."""

    is_ready: bool
    reason: str
    engine: EngineInfo | None
    tool_format: str
    warnings: list[str] = []


class Version(msgspec.Struct):
    version: str


@router.get("/ping")
@router.get("/health")
async def health(request: Request) -> Response:
    status = services_of(request).engine.status()
    return JsonResponse(Health(**asdict(status)), 200 if status.is_alive else 503)


@router.get("/health/generate")
async def health_generate(request: Request) -> Response:
    """Generates one token by the whole engine, within ten seconds."""
    services = services_of(request)
    info = engine_info(services)
    if services.engine.status().state == "paused":
        raise EngineDeadError("the engine is paused and makes no tokens; POST /resume lets it go on")
    token_id = services.tokenizer.start_token_id or 0
    probe = ChoiceRequest([min(token_id, info.vocab_size - 1)], SamplingParams(temperature=0.0), max_tokens=1)
    generation = Generation(services.engine, services.tokenizer.vocabulary, [probe])
    started_seconds = time.monotonic()
    try:
        async with asyncio.timeout(PROBE_SECONDS), aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass
    except TimeoutError:
        raise EngineDeadError(f"the engine made no token within {PROBE_SECONDS:g} s") from None
    return JsonResponse(Probe(time.monotonic() - started_seconds))


@router.get("/load")
async def load(request: Request) -> Response:
    """Returns the load for a balancer: requests counted here, and rows and blocks from the engine's latest
    snapshot."""
    services = services_of(request)
    stats = services.engine.stats
    body = Load(
        state=services.engine.status().state,
        num_requests=services.running.num_requests,
        num_waiting_tokens=services.running.num_waiting_tokens,
        num_rows_running=stats.num_requests_running,
        num_rows_waiting=stats.num_requests_waiting,
        kv_cache_usage_ratio=kv_cache_usage(stats),
    )
    return JsonResponse(body)


@router.get("/ready")
async def ready(request: Request) -> Response:
    services = services_of(request)
    engine = services.engine
    status = engine.status()
    is_ready = status.state == "serving" and status.is_alive
    reason = "no sign of life" if status.state == "serving" and not is_ready else status.state
    info = engine.info if is_ready else None
    warnings = _warnings(services) if is_ready else []
    body = Readiness(is_ready, reason, info, services.output_format.name, warnings)
    return JsonResponse(body, 200 if is_ready else 503)


def _warnings(services: Services) -> list[str]:
    """The engine must have been ready."""
    info = engine_info(services)
    lossy = [] if info.loss is None else [f"LOSSY: {info.loss}"]
    check = info.draft_check
    if check.state not in ("failed", "missing"):
        return lossy
    found = "the drafter failed its check" if check.state == "failed" else "the MTP head is missing"
    effect = "it drafts because a limit was set" if max_draft_tokens(services) else "speculation is off"
    return [*lossy, f"{found}, {effect}: {check.reason}"]


@router.get("/version")
async def version() -> Response:
    return JsonResponse(Version(__version__))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(services_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
