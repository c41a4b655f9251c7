"""Other spellings of paths, as clients and proxies write them: without /v1 or with it, and with a trailing
slash."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

ALIASES = {
    "/completions": "/v1/completions",
    "/chat/completions": "/v1/chat/completions",
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}
# A trailing slash of these paths is dropped; other paths may end with a name that has a slash of its own.
FIXED_PATHS = frozenset(ALIASES.values()) | {
    "/v1/speculation", "/dashboard", "/docs", "/docs/openapi", "/health", "/health/generate", "/load", "/metrics", "/openapi.json", "/pause", "/ping", "/ready",
    "/resume", "/tokenizer_info", "/version",
}  # fmt: skip


def canonical_path(path: str) -> str:
    """Returns the path of the route that is meant; a path without other spellings stays as it is."""
    bare = path.removesuffix("/")
    fixed = ALIASES.get(bare, bare)
    if fixed in FIXED_PATHS:
        return fixed
    return f"/v1{path}" if path.startswith("/models/") else path


class CanonicalPaths:
    """Middleware around everything that reads a path, so that keys, counters and routes know one spelling."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": canonical_path(scope["path"])}
        await self._app(scope, receive, send)
