"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

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
    services = services_of(request)
    return _json(ModelList([_card(name, services) for name in _names(services)]))


@router.get("/{model:path}")
async def show_model(request: Request, model: str) -> Response:
    services = services_of(request)
    check_model(model, services)
    return _json(_card(model, services))


def check_model(model: str | None, services: Services) -> None:
    """A request may leave the model out; a wrong one is refused."""
    names = _names(services)
    if model is not None and model not in names:
        served = ", ".join(f"'{name}'" for name in names)
        raise ApiError(
            f"The model '{model}' does not exist; this server serves {served}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _names(services: Services) -> tuple[str, ...]:
    return services.model_name, *services.other_names


def _card(name: str, services: Services) -> ModelCard:
    info = services.engine.info
    return ModelCard(name, services.started_unix, info.max_model_len if info else None)


def _json(content: ModelCard | ModelList) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
