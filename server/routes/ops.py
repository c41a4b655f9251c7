"""What operators and probes ask: /health (alive), /ready (serving), /version, /metrics."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from headway import __version__
from headway.engine import EngineInfo, Phase
from headway.server.engine_client import State
from headway.server.services import services_of

router = APIRouter()


class Health(msgspec.Struct):
    """is_alive: the engine gives signs of life in time, while it loads as well as while it serves."""

    is_alive: bool
    state: State
    phase: Phase
    progress: float
    step: int
    heartbeat_age_seconds: float | None
    num_restarts: int


class Readiness(msgspec.Struct):
    is_ready: bool
    reason: str
    engine: EngineInfo | None


class Version(msgspec.Struct):
    version: str


@router.get("/health")
async def health(request: Request) -> Response:
    status = services_of(request).engine.status()
    body = Health(
        is_alive=status.is_alive,
        state=status.state,
        phase=status.phase,
        progress=status.progress,
        step=status.step,
        heartbeat_age_seconds=status.heartbeat_age_seconds,
        num_restarts=status.num_restarts,
    )
    return _json(body, is_good=status.is_alive)


@router.get("/ready")
async def ready(request: Request) -> Response:
    engine = services_of(request).engine
    state = engine.status().state
    is_ready = state == "serving"
    return _json(Readiness(is_ready, state, engine.info if is_ready else None), is_good=is_ready)


@router.get("/version")
async def version() -> Response:
    return _json(Version(__version__))


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(services_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _json(content: msgspec.Struct, *, is_good: bool = True) -> Response:
    return Response(msgspec.json.encode(content), 200 if is_good else 503, media_type="application/json")
