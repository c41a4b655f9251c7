"""The live page is served without a key and without the network; its points need the key that the API
needs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from headway_testing.fake_chat import FirstContent
from headway_testing.fake_engine import FakeEngine

from headway.engine import EngineStats
from headway.server.app import create_app
from headway.server.http.keys import Keys
from headway.server.requests.services import Services
from headway.server.telemetry.history import Point

FOLDER = Path(__file__).parents[3] / "server/dashboard"


async def test_the_page_and_all_that_it_names_are_served(client: httpx.AsyncClient) -> None:
    page = await client.get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
    modules = [
        f"dashboard/{name}"
        for file in FOLDER.glob("*.js")
        for name in re.findall(r'from "\./([^"]+)"', file.read_text())
    ]
    assert len(named | set(modules)) >= 8
    for path in named | set(modules):
        answer = await client.get(f"/{path}")
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].split("/")[0] in ("text", "image")


@pytest.mark.parametrize(
    ("has_template", "note", "page"),
    [(True, None, "/dashboard#chat"), (True, "continues code", "/dashboard"), (False, None, "/dashboard")],
)
async def test_a_browser_finds_the_chat_of_a_model_that_chats(
    services: Services, has_template: bool, note: str | None, page: str
) -> None:
    chat = FirstContent() if has_template else None
    app = create_app(replace(services, chat=chat, chat_note=note))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://headway") as client:
        response = await client.get("/")
    assert (response.status_code, response.headers["location"]) == (307, page)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.[chj]*")), ids=lambda file: file.name)
def test_nothing_is_loaded_from_elsewhere(file: Path) -> None:
    """Addresses in comments and licences aside: what is fetched, imported or linked is relative."""
    loaded = re.findall(r"""(?:src=|href=|url\(|from |import\(|fetch\()["'`]?(\w+://|//)""", file.read_text())
    assert loaded == []


async def test_the_browser_is_told_to_load_from_here_only(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/dashboard")).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    ["/dashboard/nothing.js", "/dashboard/uplot.LICENSE", "/dashboard/../app.py", "/dashboard/%2e%2e/app.py"],
)
async def test_other_files_are_not_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_the_page_is_open_and_its_points_want_the_key(services: Services, engine: FakeEngine) -> None:
    guarded = Services("tiny", engine, services.tokenizer, services.metrics, keys=Keys(("secret",)))
    transport = httpx.ASGITransport(create_app(guarded), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        for path in ("/dashboard", "/dashboard/dashboard.js", "/dashboard/uplot.min.js"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/dashboard/data")).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.get("/dashboard/data", headers=headers)).status_code == 200


async def test_the_points_are_those_after_the_time_that_is_asked_for(
    client: httpx.AsyncClient, services: Services
) -> None:
    for seconds in (10.0, 11.0, 12.0):
        services.metrics.history.add_point(seconds)
    body = (await client.get("/dashboard/data", params={"after": "10.5"})).json()
    assert body["fields"] == list(Point.__struct_fields__)
    assert [point[0] for point in body["points"]] == [11.0, 12.0]
    assert all(len(point) == len(body["fields"]) for point in body["points"])
    assert body["quantiles"] == [0.5, 0.95, 0.99]
    assert body["server"] == {
        "version": "0.1.0", "model": "tiny", "state": "serving", "can_chat": False, "chat_note": None,
        "device": "cpu", "dtype": "float32", "drafter": "mtp", "depth": 3, "max_running": 8,
        "sampling": {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
    }  # fmt: skip


async def test_audits_are_those_that_the_engine_counted(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.stats = EngineStats(audits_by_outcome={"same": 4, "different": 1})
    assert (await client.get("/dashboard/data")).json()["audits"] == {"same": 4, "different": 1}


async def test_the_depth_is_what_an_operator_leaves(client: httpx.AsyncClient, services: Services) -> None:
    services.depth_limit.max_draft_tokens = 1
    assert (await client.get("/dashboard/data")).json()["server"]["depth"] == 1


async def test_the_page_works_while_the_engine_loads(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info, engine.state = None, "loading"
    body = (await client.get("/dashboard/data")).json()
    assert (body["server"]["state"], body["server"]["depth"], body["points"]) == ("loading", None, [])


@pytest.mark.parametrize("after", ["yesterday", "1,5"])
async def test_a_time_that_is_no_number_is_refused(client: httpx.AsyncClient, after: str) -> None:
    answer = await client.get("/dashboard/data", params={"after": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize(
    ("name", "version", "licence"),
    [
        ("uplot", "uPlot (v1.6.32)", "MIT License"),
        ("marked", "marked v18.2.1", "Permission is hereby granted, free of charge"),
        ("purify", "DOMPurify 3.5.0", "Apache License"),
        ("highlight", "Highlight.js v11.12.0", "BSD 3-Clause License"),
        ("katex", 'version:"0.19.1"', "MIT License"),
    ],
)
def test_a_library_comes_with_its_licence(name: str, version: str, licence: str) -> None:
    assert licence in (FOLDER / f"{name}.LICENSE").read_text()
    assert version in (FOLDER / f"{name}.min.js").read_text()
