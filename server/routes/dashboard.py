"""The live page: its files, which need no key, and its data, which need one if the API does."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway import __version__
from headway.server.base.errors import ApiError
from headway.server.engine.client import State
from headway.server.http.json_response import JsonResponse
from headway.server.http.page import FILES, MEDIA_TYPES
from headway.server.requests.services import Services, max_draft_tokens, services_of
from headway.server.telemetry.history import QUANTILES, Point

router = APIRouter()
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
HEADERS = {
    "Cache-Control": "no-cache",
    # uPlot sets styles by script, which needs no exception; nothing is loaded from other hosts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class ServerFacts(msgspec.Struct):
    """Facts about the server on the page. They are None while the engine loads for the first time.
    chat_note: None if there is no remark for users on the model's chats. sampling: the model's default
    parameters."""

    version: str
    model: str
    state: State
    can_chat: bool
    chat_note: str | None
    sampling: dict[str, float]
    device: str | None = None
    dtype: str | None = None
    drafter: str | None = None
    depth: int | None = None
    max_running: int | None = None


class DashboardData(msgspec.Struct):
    """fields: the names of a point's entries. quantiles: those of its latencies. audits: recomputed
    requests by outcome."""

    server: ServerFacts
    fields: tuple[str, ...]
    quantiles: tuple[float, ...]
    points: list[Point]
    audits: dict[str, int]


@router.get("/")
async def root(request: Request) -> Response:
    """Redirects to the chat if the model can chat, else to the numbers."""
    services = services_of(request)
    can_chat = services.chat is not None and services.chat_note is None
    return Response(status_code=307, headers={"Location": "/dashboard#chat" if can_chat else "/dashboard"})


@router.get("/favicon.ico")
async def favicon() -> Response:
    return page_file("icon.svg")


@router.get("/dashboard")
async def dashboard() -> Response:
    return page_file("index.html")


@router.get("/dashboard/data")
async def dashboard_data(request: Request) -> Response:
    """Returns the points after the unix time `after`, at most a quarter of an hour."""
    services = services_of(request)
    points = services.metrics.history.points_after(_seconds(request.query_params.get("after", "0")))
    audits = services.engine.stats.audits_by_outcome
    body = DashboardData(_facts(services), Point.__struct_fields__, QUANTILES, points, audits)
    return JsonResponse(body)


@router.get("/dashboard/{name}")
async def dashboard_file(name: str) -> Response:
    if name not in FILES:
        raise ApiError(f"there is no /dashboard/{name} here", status=404, code="not_found")
    return page_file(name)


def page_file(name: str, headers: Mapping[str, str] = HEADERS) -> Response:
    return Response(FILES[name], headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])


def _facts(services: Services) -> ServerFacts:
    """Returns the facts. depth: the most drafts that a request gets, which an operator may have limited."""
    info = services.engine.info
    facts = ServerFacts(
        __version__,
        services.model_name,
        services.engine.status().state,
        services.chat is not None,
        services.chat_note,
        {name: getattr(services.tokenizer.default_sampling, name) for name in SAMPLING},
    )
    if info is not None:
        facts.device, facts.dtype, facts.max_running = info.device, info.dtype, info.max_running
        facts.drafter, facts.depth = info.drafter, max_draft_tokens(services)
    return facts


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ApiError(
            f"after is {text!r}, it must be a unix time in seconds", param="after", code="invalid_value"
        ) from None
