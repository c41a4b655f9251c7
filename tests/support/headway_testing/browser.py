"""Chromium for tests of the live page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from playwright.async_api import Browser, async_playwright

from headway_testing.tools import installed

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Yields a browser. Skips the test where Chromium is not installed."""
    path = installed("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        await browser.close()
