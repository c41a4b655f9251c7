"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.protocol.models import ModelCard, ModelList
from headway.server.services import Services, check_model, services_of

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(request: Request) -> Response:
    services = services_of(request)
    return _json(ModelList([_card(name, services) for name in services.names]))


@router.get("/{model:path}")
async def show_model(request: Request, model: str) -> Response:
    services = services_of(request)
    check_model(model, services)
    return _json(_card(model, services))


def _card(name: str, services: Services) -> ModelCard:
    info = services.engine.info
    return ModelCard(name, services.started_unix, info.max_model_len if info else None)


def _json(content: ModelCard | ModelList) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
