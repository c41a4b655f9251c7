"""The ASGI application: routes, errors, and nothing of how it is started."""

from __future__ import annotations

from fastapi import FastAPI

from headway import __version__
from headway.server.errors import install_error_handlers
from headway.server.routes import chat, completions, models, ops
from headway.server.services import Services


def create_app(services: Services) -> FastAPI:
    """Starts nothing: the engine belongs to the caller."""
    app = FastAPI(
        title="Headway",
        version=__version__,
        openapi_url=None,  # bodies are decoded by msgspec: a schema made by FastAPI would be empty
        redirect_slashes=False,
    )
    app.state.services = services
    for module in (completions, chat, models, ops):
        app.include_router(module.router)
    install_error_handlers(app)
    return app
