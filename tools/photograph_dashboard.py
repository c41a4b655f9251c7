"""Takes docs/dashboard.png, a screenshot of the live page of a running server: python -P
tools/photograph_dashboard.py [URL]

Three streams run for a minute, so that the charts have a history. Then the page generates from its prompt
with and without drafts.
"""

from __future__ import annotations

import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs/dashboard.png"
PROMPTS = ("def parse(text):\n    ", "class Queue:\n", "import json\n\n\ndef load(path):\n")
LOAD_SECONDS = 60.0
GENERATION_MILLISECONDS = 120_000


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(lambda prompt: load(url, prompt), PROMPTS))
    photograph(url)


def load(url: str, prompt: str) -> None:
    deadline = time.monotonic() + LOAD_SECONDS
    while time.monotonic() < deadline:
        body = {"prompt": prompt, "max_tokens": 96, "temperature": 0.8}
        httpx.post(f"{url}/v1/completions", json=body, timeout=LOAD_SECONDS).raise_for_status()
        time.sleep(0.5)


def photograph(url: str) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: tests/install_tools.sh has its Debian package"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 900}, locale="en-GB", color_scheme="light")
        page.goto(f"{url}/dashboard")
        page.locator("#depths input").last.check(force=True)
        page.locator("#run").click()
        expect(page.locator("#run")).to_have_text("Stop")
        expect(page.locator("#run")).to_have_text("Generate", timeout=GENERATION_MILLISECONDS)
        page.wait_for_timeout(1500)  # for the point of the last second
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()
    print(f"wrote {PICTURE}: look at it before it is committed")


if __name__ == "__main__":
    main()
