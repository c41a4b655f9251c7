"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.server.http.json_response import JsonResponse
from headway.server.protocol.models import Modalities, ModelCard, ModelList
from headway.server.requests.services import Services, check_model, services_of
from headway.server.routes.capabilities import capabilities, supported_parameters

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(request: Request) -> Response:
    services = services_of(request)
    names = services.names
    cards = [_card(name, services) for name in names]
    return JsonResponse(ModelList(data=cards, first_id=names[0], last_id=names[-1]))


@router.get("/{model:path}")
async def show_model(request: Request, model: str) -> Response:
    services = services_of(request)
    check_model(model, services)
    return JsonResponse(_card(model, services))


def _card(name: str, services: Services) -> ModelCard:
    info = services.engine.info
    length = info.max_model_len if info else None
    return ModelCard(
        id=name,
        created=services.started_unix,
        max_model_len=length,
        context_length=length,
        max_input_tokens=length,
        max_tokens=length,
        display_name=name,
        created_at=datetime.fromtimestamp(services.started_unix, UTC).isoformat(),
        architecture=Modalities(["text"], ["text"]),
        supported_parameters=supported_parameters(services),
        capabilities=capabilities(services),
    )
