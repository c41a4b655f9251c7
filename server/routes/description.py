"""GET /openapi.json: the description of the API."""

from __future__ import annotations

from functools import cache

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headway.server.routes.openapi import description

router = APIRouter()


@router.get("/openapi.json")
async def show_description() -> Response:
    return Response(_encoded(), media_type="application/json")


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(description())
