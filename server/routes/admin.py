"""Routes that change a running server: POST /abort/{id}, /pause, /resume. They need the admin key."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.base.errors import ApiError
from headway.server.engine.client import State
from headway.server.http.json_response import JsonResponse
from headway.server.http.keys import credentials
from headway.server.requests.services import Services, services_of

router = APIRouter()


class Aborted(msgspec.Struct):
    id: str
    num_aborted: int


class Activity(msgspec.Struct):
    """state: the engine's, as in /ready. num_requests: HTTP requests that generate, or wait to."""

    state: State
    num_requests: int


@router.post("/abort/{name:path}")
async def abort(request: Request, name: str) -> Response:
    """name: the X-Request-Id of the request, or the id of its answer."""
    services = services_of(request)
    services.keys.check_admin(credentials(request.headers))
    num_aborted = services.running.abort(name)
    if not num_aborted:
        raise ApiError(f"no request '{name}' is running; it may have finished", status=404, code="not_found")
    return JsonResponse(Aborted(name, num_aborted))


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Stops the generation of tokens until /resume: running requests stay admitted, new ones wait.

    An engine that loads or restarts begins paused.
    """
    services = services_of(request)
    services.keys.check_admin(credentials(request.headers))
    services.engine.pause()
    return JsonResponse(_activity(services))


@router.post("/resume")
async def resume(request: Request) -> Response:
    services = services_of(request)
    services.keys.check_admin(credentials(request.headers))
    services.engine.resume()
    return JsonResponse(_activity(services))


def _activity(services: Services) -> Activity:
    return Activity(services.engine.status().state, services.running.num_requests)
