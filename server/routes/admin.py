"""What changes a running server: POST /abort/{id}. Needs the admin key."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.errors import ApiError
from headway.server.services import services_of

router = APIRouter()


class Aborted(msgspec.Struct):
    id: str
    num_aborted: int


@router.post("/abort/{name}")
async def abort(request: Request, name: str) -> Response:
    """name: the X-Request-Id of the request, or the id of its answer."""
    services = services_of(request)
    services.keys.check_admin(request.headers.get("Authorization", ""))
    num_aborted = services.running.abort(name)
    if not num_aborted:
        raise ApiError(f"no request '{name}' is running; it may have finished", status=404, code="not_found")
    return Response(msgspec.json.encode(Aborted(name, num_aborted)), media_type="application/json")
