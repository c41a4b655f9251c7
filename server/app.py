"""The ASGI application: its routes, middleware and error handlers. How it is started is not known here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from headway import __version__
from headway.server.base.errors import install_error_handlers
from headway.server.http.continued import ContinuedRequests
from headway.server.http.guard import REQUEST_ID, Guard, HeadAsGet, RequestIds
from headway.server.http.origins import AllowedOrigins
from headway.server.http.paths import CanonicalPaths
from headway.server.requests.access import IGNORED, AccessLog, RequestRecord
from headway.server.requests.services import Services
from headway.server.routes import (
    admin,
    chat,
    completions,
    dashboard,
    docs,
    messages,
    models,
    openapi,
    ops,
    responses,
    speculation,
    tokens,
)


def create_app(
    services: Services,
    *,
    cors_origins: Sequence[str] = (),
    trace: Callable[[RequestRecord], None] | None = None,
    origins: AllowedOrigins | None = None,
    fleet_key: str | None = None,
) -> ASGIApp:
    """Returns the application. It starts nothing: the engine belongs to the caller.

    origins: None allows any Host and Origin. fleet_key: the key that marks requests of a fleet's ingress;
    None outside of a fleet.

    The middleware, outermost first: canonical paths, request ids, requests that a fleet continues, the access
    log, CORS, the guard.
    """
    app = FastAPI(
        title="Headway",
        version=__version__,
        openapi_url=None,  # bodies are decoded by msgspec: FastAPI's own would be empty; ours is routes/openapi.py
        redirect_slashes=False,
    )
    app.state.services = services
    for module in (
        completions, chat, messages, responses, tokens, speculation, models, ops, admin, openapi, dashboard, docs,
    ):  # fmt: skip
        app.router.routes.extend(module.router.routes)  # flat: a 405 looks for all routes of its path
    install_error_handlers(app)
    guarded: ASGIApp = Guard(HeadAsGet(app), services.keys, origins or AllowedOrigins())
    if cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, IGNORED],
        )
    logged: ASGIApp = AccessLog(guarded, services.metrics, services.model_name, trace)
    return CanonicalPaths(RequestIds(logged if fleet_key is None else ContinuedRequests(logged, fleet_key)))
