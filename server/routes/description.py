"""GET /openapi.json: the description of the API."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headway.server.routes.openapi import description

router = APIRouter()


@router.get("/openapi.json")
async def show_description() -> Response:
    return Response(msgspec.json.encode(description()), media_type="application/json")
