"""Answers whose body is one JSON value."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    """Starlette's JSONResponse with msgspec as its encoder, which knows the structs of the wire format."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)
