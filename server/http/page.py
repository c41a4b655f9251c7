"""The files of the live page and of the documentation, with the paths at which they are served."""

from __future__ import annotations

from importlib.resources import files

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
}
_DOCS = (*MEDIA_TYPES, "md")
FILES = {
    entry.name: entry.read_bytes()
    for entry in files("headway.server").joinpath("dashboard").iterdir()
    if entry.name.rpartition(".")[2] in MEDIA_TYPES
}
# The documentation has the same paths in the repository, in a wheel and on the server, so that its links work
# in all three.
DOCS = {
    **{f"/{name}": files("headway").joinpath(name).read_bytes() for name in ("README.md", "CHANGELOG.md")},
    **{
        f"/docs/{entry.name}": entry.read_bytes()
        for entry in files("headway").joinpath("docs").iterdir()
        if entry.name.rpartition(".")[2] in _DOCS
    },
}
PAGE_PATHS = frozenset(
    {"/dashboard", "/docs", "/docs/openapi", *DOCS, *(f"/dashboard/{name}" for name in FILES)}
)
