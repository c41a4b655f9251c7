"""The numbers of the live page in a browser: what it shows of points and facts that a test makes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Page, Route, expect

from headway.server.routes.dashboard import DashboardData, ServerFacts
from headway.server.telemetry.history import QUANTILES, Point

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
BEGIN = 1_800_000_000.0


def point(second: int, **change: Any) -> Point:
    """A second of a busy server: half of the rounds draft three tokens, a quarter one and a quarter none."""
    values: dict[str, Any] = {
        "time_unix": BEGIN + second, "tokens_per_second": 900.0 + second, "prompt_tokens_per_second": 10.0, "num_running": 3,
        "num_waiting": 0, "kv_cache_usage_ratio": 0.4, "depth": 1.75, "depth_shares": [0.25, 0.25, 0.0, 0.5],
        "acceptance_length": 2.4, "speedup": 1.5 + second / 100, "acceptance_per_position": [0.8, 0.7, 0.5],
    }  # fmt: skip
    latencies = ("time_to_first_token", "time_per_output_token", "chunk_gap", "end_to_end")
    return Point(**(values | {name: [0.01, 0.02, 0.03] for name in latencies} | change))


@dataclass
class Told:
    """What the server tells the page. Mutable: the tests set it."""

    server: ServerFacts = field(
        default_factory=lambda: ServerFacts(
            "0.1.0", "tiny", "serving", can_chat=False, chat_note=None, sampling={},
            device="cuda", dtype="bfloat16", drafter="mtp", depth=3, max_running=8,
        )
    )  # fmt: skip
    points: list[Point] = field(default_factory=lambda: [point(second) for second in range(44)])
    audits: dict[str, int] = field(default_factory=dict)

    async def answer(self, route: Route) -> None:
        after = float(route.request.url.partition("after=")[2])
        points = [point for point in self.points if point.time_unix > after]
        data = DashboardData(self.server, Point.__struct_fields__, QUANTILES, points, self.audits)
        await route.fulfill(body=msgspec.json.encode(data), content_type="application/json")


@pytest.fixture
def expected() -> tuple[str, ...]:
    return ()


@pytest_asyncio.fixture(loop_scope="session")
async def show(page: Page, address: str, said: list[str]) -> Any:
    """Opens the page with what is told."""

    async def show(told: Told, width: int = 1440) -> Page:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.route("**/dashboard/data*", told.answer)
        await page.goto(f"{address}/dashboard")
        await expect(page.locator("#state")).to_have_text(told.server.state)
        return page

    return show


async def test_the_estimated_speedup_is_one_large_number_with_its_history(show: Callable[..., Any]) -> None:
    page = await show(Told())
    value = page.locator("#speedup-value")
    await expect(value).to_have_text("1.93\u00d7")
    await expect(page.locator("#speedup-chart .u-series", has_text="speed-up")).to_contain_text("1.93\u00d7")
    sizes = await page.locator("#speedup-value, .tiles dd, h1").evaluate_all(
        "all => all.map((one) => parseFloat(getComputedStyle(one).fontSize))"
    )
    assert sizes.count(max(sizes)) == 1
    size = await value.evaluate("one => parseFloat(getComputedStyle(one).fontSize)")
    assert size == max(sizes) > 2 * sorted(sizes)[-2]


@pytest.mark.parametrize(
    ("facts", "num_points", "words"),
    [
        ({"drafter": "none", "depth": 0}, 9, "no drafter"),
        ({"drafter": None, "depth": None, "device": None, "state": "loading"}, 0, "not known yet"),
        ({"depth": 0}, 9, "drafts are off"),
        ({}, 0, "no rounds"),
    ],
    ids=["no-drafter", "loading", "limit-0", "no-rounds"],
)
async def test_why_there_is_no_speedup_is_told(
    show: Callable[..., Any], facts: dict[str, Any], num_points: int, words: str
) -> None:
    told = Told(points=[point(i, speedup=None) for i in range(num_points)])
    told.server = msgspec.structs.replace(told.server, **facts)
    page = await show(told)
    await expect(page.locator("#speedup-value")).to_have_text(words)
    await expect(page.locator("#speedup-note")).to_have_text(re.compile(r"^[A-Z].+\.$"))


async def test_the_depth_chosen_is_shown_as_shares_on_top_of_each_other(show: Callable[..., Any]) -> None:
    page = await show(Told())
    chart = page.locator(".chart", has_text="Depth chosen")
    legend = chart.locator(".u-series")
    for label, share in (
        ("no drafts", "25 %"),
        ("1 draft", "25 %"),
        ("2 drafts", "0 %"),
        ("3 drafts", "50 %"),
    ):
        await expect(legend.filter(has_text=label).last).to_contain_text(share)
    heights = await chart.locator("canvas").evaluate(
        """(canvas) => {
            const x = Math.round(0.9 * canvas.width), image = canvas.getContext("2d").getImageData(x, 0, 1, canvas.height);
            const counts = {};
            for (let i = 0; i < image.data.length; i += 4) {
                const [red, green, blue, alpha] = image.data.slice(i, i + 4);
                if (alpha > 100 && alpha < 160) counts[[red, green, blue]] = (counts[[red, green, blue]] ?? 0) + 1;
            }
            return Object.values(counts).sort((one, other) => other - one);
        }"""
    )
    most, *others = [height for height in heights if height > 10]
    assert len(others) == 2
    assert others == pytest.approx([most / 2, most / 2], rel=0.2)


async def test_rounds_before_a_limit_of_the_depth_stay_visible(show: Callable[..., Any]) -> None:
    told = Told()
    told.server.depth = 1
    page = await show(told)
    legend = page.locator(".chart", has_text="Depth chosen").locator(".u-series")
    await expect(legend.filter(has_text="3 drafts")).to_contain_text("50 %")


@pytest.mark.parametrize(
    ("audits", "words", "is_bad"),
    [
        ({}, "off", False),
        pytest.param({"same": 0, "different": 0, "dropped": 0}, "off", False, marks=pytest.mark.long),
        pytest.param(
            {"same": 12, "different": 0, "dropped": 0}, "12 of 12 the same", False, marks=pytest.mark.long
        ),
        ({"same": 1200, "different": 0, "dropped": 3}, "1,200 of 1,200 the same, 3 dropped", False),
        ({"same": 12, "different": 2, "dropped": 0}, "2 of 14 differ", True),
        pytest.param(
            {"same": 0, "different": 0, "dropped": 3}, "none 3 dropped", False, marks=pytest.mark.long
        ),
    ],
    ids=["not-counted", "off", "same", "dropped", "different", "only-dropped"],
)
async def test_audits_are_told_and_red_where_a_text_was_different(
    show: Callable[..., Any], audits: dict[str, int], words: str, is_bad: bool
) -> None:
    page = await show(Told(audits=audits))
    tile = page.locator(".tiles > div", has=page.locator("dt", has_text=re.compile("^audit$"))).locator("dd")
    await expect(tile).not_to_be_empty()
    assert " ".join(await tile.locator("*").all_text_contents()) == words
    colours = await tile.locator("*").evaluate_all("all => all.map((one) => getComputedStyle(one).color)")
    bad = await page.evaluate(
        "() => { const one = document.createElement('i'); one.style.color = 'var(--bad)'; document.body.append(one);"
        " const colour = getComputedStyle(one).color; one.remove(); return colour; }"
    )
    assert {colour == bad for colour in colours} == {is_bad}


async def test_the_numbers_fit_in_both_themes(show: Callable[..., Any], page: Page) -> None:
    await show(Told(), 360)
    for width in (360, 1440):
        await page.set_viewport_size({"width": width, "height": 900})
        for theme in ("light", "dark"):
            await page.emulate_media(color_scheme=theme)
            await expect(page.locator("html")).to_have_attribute("data-theme", theme)
            await check_fit(page, width)


async def check_fit(page: Page, width: int) -> None:
    await expect(page.locator("#speedup-value")).to_have_text("1.93\u00d7")
    await expect(page.locator("html")).to_have_js_property("scrollWidth", width)
    outside = await page.locator(".speedup *, .tiles *, .charts *").evaluate_all(
        """(all, width) => all.filter((one) => {
            const box = one.getBoundingClientRect();
            return one.checkVisibility() && (box.left < 0 || box.right > width);
        }).map((one) => one.outerHTML.slice(0, 80))""",
        width,
    )
    assert outside == []
