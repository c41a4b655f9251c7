"""What the routes share: built once by who starts the server, found through the request's app."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from headway.engine import EngineDeadError, EngineInfo
from headway.server.chat_template import ChatRenderer
from headway.server.engine_client import EngineClient
from headway.server.metrics import Metrics
from headway.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Services:
    """chat: None for a model without a chat template."""

    model_name: str
    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    chat: ChatRenderer | None = None
    started_unix: int = field(default_factory=lambda: int(time.time()))


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def engine_info(services: Services) -> EngineInfo:
    """Raises EngineDeadError while there is none."""
    info = services.engine.info
    if info is None:
        raise EngineDeadError("the model is still loading; /health tells how far it is")
    return info
