"""The files of the live page, and the paths at which they are served."""

from __future__ import annotations

from importlib.resources import files

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = {
    entry.name: entry.read_bytes()
    for entry in files("headway.server").joinpath("dashboard").iterdir()
    if entry.name.rpartition(".")[2] in MEDIA_TYPES
}
PAGE_PATHS = frozenset({"/dashboard", *(f"/dashboard/{name}" for name in FILES)})
