"""The documentation: its pages as HTML, at the paths of the repository, and the API as forms."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from html import escape
from itertools import pairwise

from fastapi import APIRouter
from markdown_it import MarkdownIt
from starlette.requests import Request
from starlette.responses import Response

from headway.server.base.errors import ApiError
from headway.server.http.page import DOCS, MEDIA_TYPES
from headway.server.routes.dashboard import HEADERS, page_file

router = APIRouter()
# Swagger UI's style sheet contains pictures.
OPENAPI_HEADERS = {
    "Content-Security-Policy": HEADERS["Content-Security-Policy"].replace(
        "img-src 'self'", "img-src 'self' data:"
    )
}
PAGE = """\
<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>{title} · Headway</title>
  <link rel="icon" href="{root}dashboard/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="{root}dashboard/docs.css">
</head>
<body>
<nav aria-label="documentation">
  <a href="{root}docs/index.md">Documentation</a> <a href="{root}docs/openapi">Try the API</a> <a href="{root}dashboard">Live page</a>
</nav>
<main>
{content}</main>
</body>
</html>
"""


@router.get("/docs")
async def docs() -> Response:
    return Response(status_code=307, headers={"Location": "/docs/index.md"})


@router.get("/docs/openapi")
async def openapi() -> Response:
    return page_file("openapi.html", OPENAPI_HEADERS)


@router.get("/README.md")
@router.get("/CHANGELOG.md")
@router.get("/docs/{name}")
async def docs_file(request: Request) -> Response:
    path = request.scope["path"]
    if path not in DOCS:
        raise ApiError(
            f"there is no {path} here; /docs/index.md lists the pages", status=404, code="not_found"
        )
    ending = path.rpartition(".")[2]
    if ending != "md":
        return Response(DOCS[path], headers=HEADERS, media_type=MEDIA_TYPES[ending])
    # The longest page takes 0.2 s.
    return Response(await asyncio.to_thread(page, path), headers=HEADERS, media_type=MEDIA_TYPES["html"])


@cache
def page(path: str) -> str:
    """Returns a page of DOCS as HTML. Headings have the ids that GitHub gives them."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(DOCS[path].decode())
    headings = [pair for pair in pairwise(tokens) if pair[0].type == "heading_open"]
    for heading, title in headings:
        heading.attrSet("id", re.sub(r"[^\w -]", "", title.content.lower()).replace(" ", "-"))
    root = "../" * (path.count("/") - 1)
    content = markdown.renderer.render(tokens, markdown.options, {})
    return PAGE.format(title=escape(headings[0][1].content), root=root, content=content)
