"""The documentation in a browser: the API as forms, which ask this server alone, and pages on a phone."""

from __future__ import annotations

import pytest
from headway_testing.chat_page import ChatPage
from playwright.async_api import expect

from headway.server.routes.openapi import OPERATIONS

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]


async def test_the_api_can_be_tried_on_its_page(chat: ChatPage) -> None:
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    await chat.find("#docs").click()
    await chat.page.get_by_role("link", name="Try the API").click()
    await expect(chat.find(".opblock")).to_have_count(len(OPERATIONS))
    version = chat.find("#operations-default-get_version")
    await version.get_by_role("button").first.click()
    await version.get_by_text("Try it out").click()
    await version.get_by_text("Execute").click()
    await expect(version.locator(".live-responses-table tbody .response-col_status")).to_contain_text("200")
    home = chat.page.url.partition("/docs")[0]
    assert [url for url in asked if not url.startswith((home, "data:"))] == []


@pytest.mark.parametrize("width", [390, 1440])
async def test_pages_are_no_wider_than_the_window(chat: ChatPage, width: int) -> None:
    await chat.page.set_viewport_size({"width": width, "height": 844})
    await chat.find("#docs").click()
    for name in ("models", "clients", "from_other_servers", "exactness", "troubleshooting", "api"):
        await chat.page.goto(f"{chat.page.url.rpartition('/')[0]}/{name}.md")
        await expect(chat.find("h1")).to_be_visible()
        assert await chat.page.evaluate("document.documentElement.scrollWidth") <= width
