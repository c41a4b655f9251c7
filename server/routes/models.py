"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.errors import ApiError
from headway.server.protocol.models import ModelCard, ModelList
from headway.server.services import Services, services_of

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(request: Request) -> Response:
    return _json(ModelList([_card(services_of(request))]))


@router.get("/{model:path}")
async def show_model(request: Request, model: str) -> Response:
    services = services_of(request)
    check_model(model, services)
    return _json(_card(services))


def check_model(model: str | None, services: Services) -> None:
    """A request may leave the model out; a wrong one is refused."""
    if model not in (None, services.model_name):
        raise ApiError(
            f"The model '{model}' does not exist; this server serves '{services.model_name}'",
            status=404,
            param="model",
            code="model_not_found",
        )


def _card(services: Services) -> ModelCard:
    info = services.engine.info
    return ModelCard(services.model_name, services.started_unix, info.max_model_len if info else None)


def _json(content: ModelCard | ModelList) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
