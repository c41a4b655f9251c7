"""The live page in a real browser against a real server: prompt, colours, depths, themes, widths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from headway_testing.daemon import Server
from headway_testing.tools import installed
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

pytestmark = pytest.mark.slow

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PROMPT = "def parse(text):\n    "
BODY = {"temperature": 0, "repetition_penalty": 1.1}  # what the page sends at temperature 0
MILLISECONDS = 60_000  # for a text on a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = installed("chromium")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page, loaded; at the end nothing may have been said on the console, nor asked of other hosts.

    But what Chromium itself says of every answer that is a refusal.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, locale="en-GB")
    opened = context.new_page()
    opened.add_init_script(
        "Math.random = () => 0.25"
    )  # the seed of drawn texts, which are then the same in every run
    said: list[str] = []
    asked: list[str] = []
    opened.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{server.url}/dashboard")
    expect(opened.locator("#state")).to_have_text("serving")
    yield opened
    context.close()
    assert [line for line in said if "status of 400" not in line] == []
    assert [url for url in asked if not url.startswith(server.url)] == []


def generate(page: Page, *, depth: int, tokens: int = 40, compares: bool = False) -> None:
    page.locator("#prompt").fill(PROMPT)
    page.locator(f"#depths input[value='{depth}']").check(force=True)
    page.locator("#max-tokens").fill(str(tokens))
    page.locator("#compare").set_checked(compares)
    page.locator("#run").click()
    expect(page.locator("#run")).to_have_text("Generate", timeout=MILLISECONDS)


def text_of(page: Page, run: int = 0) -> str:
    """Without the prompt."""
    return "".join(page.locator(".run").nth(run).locator(".text span:not(.prompt)").all_text_contents())


def tokens_by_position(page: Page) -> dict[str, int]:
    spans = page.locator(".run").first.locator(".text span:not(.prompt)")
    positions = spans.evaluate_all("spans => spans.map(span => span.dataset.position)")
    return {position: positions.count(position) for position in sorted(set(positions))}


def test_the_page_offers_every_depth_of_the_server(page: Page) -> None:
    expect(page.locator("#depths span")).to_have_text(["0", "1", "2", "3"])
    expect(page.locator("#legend li")).to_have_count(4)
    expect(page.locator("#server")).to_contain_text("headway-demo")


def test_the_text_is_what_the_api_gives_and_its_drafts_are_coloured(page: Page, server: Server) -> None:
    page.locator("#temperature").fill("0")
    generate(page, depth=3)
    body = BODY | {"prompt": PROMPT, "max_tokens": 40, "speculation": {"draft_positions": True}}
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert text_of(page) == choice["text"]
    positions = choice["speculation"]["draft_positions"]
    assert tokens_by_position(page) == {str(i): positions.count(i) for i in sorted(set(positions))}
    assert {1, 2, 3} <= set(positions)
    num_accepted = sum(position > 0 for position in positions)
    expect(page.locator(".run .counts")).to_have_text(
        re.compile(rf"· {num_accepted} of \d+ drafts accepted$")
    )
    colours = page.locator(".run .text span:not(.prompt)").evaluate_all(
        "spans => spans.map(span => [span.dataset.position, getComputedStyle(span).backgroundColor])"
    )
    by_position = {position: {colour for p, colour in colours if p == position} for position, _ in colours}
    assert all(len(found) == 1 for found in by_position.values())
    assert len(set.union(*by_position.values())) == 4
    assert by_position["0"] == {"rgba(0, 0, 0, 0)"}


def test_without_drafts_every_token_is_the_models(page: Page) -> None:
    page.locator("#temperature").fill("0")  # a drawn text may end before
    generate(page, depth=0)
    assert tokens_by_position(page) == {"0": 40}
    expect(page.locator(".run .counts")).to_have_text("40 tokens in 40 steps of the model")


def test_two_depths_stand_side_by_side_with_the_same_text(page: Page) -> None:
    page.locator("#temperature").fill("0.8")
    generate(page, depth=2, compares=True)
    expect(page.locator(".run h3")).to_have_text(["2 drafts a round", "without drafts"])
    expect(page.locator("#verdict")).to_contain_text("the same text, token for token")
    counts = tokens_by_position(page)
    told = f"{sum(counts.values()) / counts['0']:.2f} tokens a step of the model"
    expect(page.locator("#verdict strong")).to_have_text(told)
    assert text_of(page, 0) == text_of(page, 1) != ""
    for speed in page.locator(".speed output").all_text_contents():
        assert float(speed.replace(",", "")) > 0


def test_text_beyond_the_basic_plane_keeps_its_tokens(page: Page, server: Server) -> None:
    """JavaScript counts code units, the API characters."""
    page.locator("#temperature").fill("0")
    body = BODY | {"prompt": "# 😀😀 naïve 日本\n", "max_tokens": 24}
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    page.locator("#compare").set_checked(False)
    page.locator("#prompt").fill(body["prompt"])
    page.locator("#max-tokens").fill("24")
    page.locator("#run").click()
    expect(page.locator("#run")).to_have_text("Generate", timeout=MILLISECONDS)
    assert text_of(page) == choice["text"]


def test_what_the_server_refuses_is_told(page: Page) -> None:
    page.locator("#temperature").evaluate("input => { input.max = 9; }")
    page.locator("#temperature").fill("3")
    page.locator("#run").click()
    expect(page.locator("#verdict[data-kind=error]")).to_contain_text("temperature is 3")


def test_a_run_can_be_stopped(page: Page, server: Server) -> None:
    def never_ends(route: Route) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    page.route("**/v1/completions", never_ends)  # a drawn text may end before it is stopped
    page.locator("#max-tokens").fill("1500")
    page.locator("#compare").set_checked(False)
    page.locator("#run").click()
    expect(page.locator(".run .counts")).to_contain_text("tokens in", timeout=MILLISECONDS)
    page.locator("#run").click()
    expect(page.locator("#verdict")).to_have_text("stopped")
    server.wait_until_idle()


def test_tiles_and_charts_show_the_load(page: Page) -> None:
    generate(page, depth=3, tokens=60)
    acceptance = page.locator(".chart", has_text="Acceptance by position")
    expect(acceptance.locator(".u-series", has_text="draft 1")).to_contain_text("%")
    expect(page.locator(".tiles dd").nth(6)).to_contain_text("s")
    expect(page.locator("#speedup-value")).to_have_text(re.compile(r"^\d\.\d\d\u00d7$"))
    depths = page.locator(".chart", has_text="Depth chosen").locator(".u-series")
    expect(depths.filter(has_text="3 drafts")).to_contain_text(re.compile(r"[1-9]\d* %"))
    drawn = page.locator(".chart canvas").evaluate_all(
        "all => all.map(canvas => canvas.width * canvas.height)"
    )
    assert len(drawn) == 10
    assert min(drawn) > 0


@pytest.mark.parametrize("widths", [(320, 1920), pytest.param((768,), marks=pytest.mark.long)])
def test_the_page_fits_in_both_themes(page: Page, widths: tuple[int, ...], tmp_path: Path) -> None:
    page.set_viewport_size({"width": widths[0], "height": 900})
    generate(page, depth=3, tokens=24)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in ("light", "dark"):
            page.emulate_media(color_scheme=theme)
            check_fit(page, theme, width, tmp_path / "page.png")


def check_fit(page: Page, theme: str, width: int, picture: Path) -> None:
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
    expect(page.locator("html")).to_have_js_property("scrollWidth", width)
    hidden = page.locator("button, input, textarea, output, dd, h2, h3, canvas").evaluate_all(
        """(all, width) => all.filter((one) => {
            const box = one.getBoundingClientRect();
            return one.offsetParent && (box.width === 0 || box.left < 0 || box.right > width);
        }).map((one) => one.outerHTML.slice(0, 80))""",
        width,
    )
    assert hidden == []
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(brightness) / 3 > 128) == (theme == "light")
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 10_000


def test_a_click_changes_the_theme_and_it_stays(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(page.locator("#theme")).to_have_text("theme: dark")


def test_a_server_with_keys_asks_for_one_and_keeps_it_for_the_tab(browser: Browser, guarded: Server) -> None:
    context = browser.new_context()
    opened = context.new_page()
    try:
        opened.goto(f"{guarded.url}/dashboard")
        expect(opened.locator("#state")).to_have_text("needs a key")
        opened.locator("#key").fill("wrong")
        opened.locator("#key-form button").click()
        expect(opened.locator("#key-form")).to_be_visible()
        expect(opened.locator("#key-form label")).to_contain_text("refused the key")
        expect(opened.locator("#state")).to_have_text("wrong key")
        opened.locator("#key").fill("secret")
        opened.locator("#key-form button").click()
        expect(opened.locator("#state")).to_have_text("serving")
        generate(opened, depth=1, tokens=8)
        opened.reload()
        expect(opened.locator("#state")).to_have_text("serving")
    finally:
        context.close()
