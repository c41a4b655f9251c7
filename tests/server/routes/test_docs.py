"""The documentation is served without a key; every link leads to a page and a heading of it, also those that
errors name."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx
import pytest

from headway.server.app import create_app
from headway.server.http.keys import Keys
from headway.server.json_schema import keywords
from headway.server.protocol import unserved
from headway.server.requests.services import Services


class Markup(HTMLParser):
    """The addresses that a page names, and the ids of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.ids: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in ("href", "src"):
                self.addresses.add(value or "")
            elif name == "id":
                self.ids.add(value or "")


async def crawl(client: httpx.AsyncClient, *paths: str) -> dict[str, Markup | None]:
    """{path: its page, None for other files} of all that can be reached from the paths."""
    found: dict[str, Markup | None] = {}
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        answer = await client.get(path)
        assert answer.status_code == 200, path
        is_page = answer.headers["content-type"].startswith("text/html") and path.endswith(".md")
        found[path] = Markup(answer.text) if is_page else None
        for address in found[path].addresses if found[path] else ():
            target = urldefrag(urljoin(path, address)).url
            if not urlsplit(target).netloc:
                waiting.append(target)
    return found


async def test_every_link_of_every_page_leads_somewhere(client: httpx.AsyncClient) -> None:
    assert (await client.get("/docs")).headers["location"] == "/docs/index.md"
    pages = await crawl(client, "/docs/index.md")
    wanted = {
        "models",
        "clients",
        "from_other_servers",
        "exactness",
        "troubleshooting",
        "running",
        "api",
        "runbook",
    }
    assert {"/README.md", "/CHANGELOG.md", "/docs/chat.png", *(f"/docs/{name}.md" for name in wanted)} <= set(
        pages
    )
    astray = [
        (path, address)
        for path, page in pages.items()
        for address in (page.addresses if page else ())
        for target, anchor in [urldefrag(urljoin(path, address))]
        if anchor and (there := pages.get(target)) and anchor not in there.ids
    ]
    assert astray == []


@pytest.mark.parametrize("named", [keywords.PAGE, unserved.PAGE])
async def test_what_errors_name_is_served(client: httpx.AsyncClient, named: str) -> None:
    path, anchor = urldefrag(named)
    assert anchor in Markup((await client.get(path)).text).ids


async def test_a_page_is_markup_that_loads_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    answer = await client.get("/docs/models.md")
    assert "<table>" in answer.text
    assert "```" not in answer.text
    assert Markup(answer.text).tags.isdisjoint({"script", "style", "iframe"})
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


async def test_pages_and_the_description_want_no_key(services: Services) -> None:
    app = create_app(replace(services, keys=Keys(("secret",))))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        for path in ("/docs/", "/docs/api.md", "/README.md", "/docs/openapi", "/openapi.json"):
            assert (await client.get(path)).status_code in (200, 307), path
        assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("name", ["nothing.md", "results.json", "../app.py", "%2e%2e/app.py", ""])
async def test_nothing_else_is_served(client: httpx.AsyncClient, name: str) -> None:
    answer = await client.get(f"/docs/{name}")
    assert answer.status_code == (307 if name == "" else 404)
