"""The objects that the routes share. They are made once at start and found through the request's app."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from functools import partial

from starlette.requests import Request

from headway import __version__
from headway.engine import EngineDeadError, EngineInfo
from headway.server.base.config import ServiceLimits
from headway.server.base.errors import ApiError
from headway.server.engine.client import EngineClient
from headway.server.formats import OutputFormat, find_format
from headway.server.generation.in_flight import InFlight
from headway.server.grammar.grammars import Grammars, no_grammars
from headway.server.http.keys import Keys
from headway.server.http.unread_bodies import UnreadBodies
from headway.server.telemetry.metrics import Metrics
from headway.server.text.chat_template import ChatRenderer
from headway.server.text.template_limits import KnownLimits
from headway.server.text.tokenizer import Tokenizer
from headway.server.text.tokenizer_info import TokenizerInfo, no_tokenizer_info


@dataclass(slots=True)
class DepthLimit:
    """The most drafts of a round for all requests; None if the engine's depth is the only limit.

    Mutable: PUT /v1/speculation is its only writer.
    """

    max_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """chat: None for a model without a chat template; template_source is then empty. output_format: how
    the model writes reasoning and calls of tools. chat_stop_strings, chat_note: see ChatTemplate.
    other_names: further names of the model in requests; answers have model_name. logged_fields: names of
    fields without effect that were logged; body.py is its only writer."""

    model_name: str
    engine: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    chat: ChatRenderer | None = None
    template_source: str = ""
    chat_stop_strings: tuple[str, ...] = ()
    chat_note: str | None = None
    output_format: OutputFormat = field(default_factory=partial(find_format, None))
    template_limits: KnownLimits = field(default_factory=KnownLimits)
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    keys: Keys = field(default_factory=Keys)
    running: InFlight = field(default_factory=InFlight)
    unread_bodies: UnreadBodies = field(default_factory=UnreadBodies)
    tokenizer_info: TokenizerInfo = field(default_factory=no_tokenizer_info)
    depth_limit: DepthLimit = field(default_factory=DepthLimit)
    other_names: tuple[str, ...] = ()
    grammars: Grammars = field(default_factory=no_grammars)
    logged_fields: set[str] = field(default_factory=set)
    started_unix: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns all names of the model in requests."""
        return self.model_name, *self.other_names


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def engine_info(services: Services) -> EngineInfo:
    """Raises EngineDeadError while the engine has never been ready."""
    info = services.engine.info
    if info is None:
        raise EngineDeadError("the model is still loading; /health shows its progress")
    return info


def system_fingerprint(services: Services) -> str:
    """Returns a fingerprint of model, version and device settings. While it stays the same, equal seeds
    give equal texts, unless it says LOSSY."""
    info = engine_info(services)
    facts = (__version__, services.model_name, info.architecture, info.num_parameters, info.device, info.dtype,
             info.cpu_weights, info.max_model_len, info.is_deterministic)  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return f"fp_{digest}" if info.loss is None else f"fp_LOSSY_{digest}"


def check_model(model: str | None, services: Services) -> None:
    """Refuses the name of another model; a request may leave the model out."""
    if model is not None and model not in services.names:
        served = ", ".join(f"'{name}'" for name in services.names)
        raise ApiError(
            f"The model '{model}' does not exist; this server serves {served}",
            status=404,
            param="model",
            code="model_not_found",
        )


def max_draft_tokens(services: Services) -> int:
    """Returns the most drafts of a round, whatever a request asks for."""
    info, limit = engine_info(services), services.depth_limit.max_draft_tokens
    if limit is None:
        return 0 if info.draft_check.turns_speculation_off else info.depth
    return min(info.depth, limit)


def request_id_of(request: Request) -> str:
    return str(request.state.request_id)
