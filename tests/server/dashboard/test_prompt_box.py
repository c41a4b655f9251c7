"""The prompt box of the live page in a browser over a FakeEngine: chats, operators, engines that come and
go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from headway_testing.fake_chat import JoinedContents
from headway_testing.fake_engine import FakeEngine
from playwright.async_api import Page, expect

from headway.server.formats import find_format
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
SCRIPT = "the quick brown fox 日本語 😀 jumps"


@pytest.fixture
def services(services: Services) -> Services:
    return Services("tiny", services.engine, services.tokenizer, services.metrics, JoinedContents())


@pytest_asyncio.fixture(loop_scope="session")
async def box(page: Page, address: str) -> Page:
    await page.goto(f"{address}/dashboard")
    return page


async def positions(box: Page) -> list[str]:
    spans = box.locator(".run").first.locator(".text span:not(.prompt)")
    return list(await spans.evaluate_all("spans => spans.map(span => span.dataset.position)"))


@pytest.mark.parametrize("as_chat", [True, False], ids=["chat", "text"])
async def test_a_model_that_chats_is_asked_by_messages_unless_told_otherwise(
    box: Page, engine: FakeEngine, tokenizer: Tokenizer, as_chat: bool
) -> None:
    ids = tokenizer.encode(SCRIPT)
    engine.script = lambda request: ids
    await box.locator("#as-chat").set_checked(as_chat)
    await box.locator("#compare").set_checked(False)
    await box.locator("#prompt").fill("hello")
    async with box.expect_request("**/v1/**") as request:
        await box.locator("#run").click()
    assert (await request.value).url.endswith("/v1/chat/completions" if as_chat else "/v1/completions")
    await expect(box.locator(".run .text")).to_have_text(("" if as_chat else "hello") + tokenizer.decode(ids))
    rounds = [["1", "2", "0"][: len(ids) - i] for i in range(0, len(ids), 3)]
    rounds[-1][-1] = "0"  # the last of a round is no draft
    assert await positions(box) == [position for one in rounds for position in one]


class TestModelThatReasons:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return replace(services, output_format=find_format("</think>"))

    async def test_its_reasoning_is_shown_before_its_answer(
        self, box: Page, answer: Callable[..., None]
    ) -> None:
        answer("<think>the dog</think>the quick brown fox")
        await box.locator("#compare").set_checked(False)
        await box.locator("#run").click()
        await expect(box.locator(".run .text i")).to_have_text("the dog")
        await expect(box.locator(".run .text samp")).to_have_text("the quick brown fox")


class TestModelThatContinuesText:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return replace(services, chat_note="continues code after comments")

    async def test_it_is_asked_by_text_unless_told_otherwise(self, box: Page) -> None:
        await expect(box.locator("#as-chat-label")).to_be_visible()
        await expect(box.locator("#as-chat-label")).to_have_attribute(
            "title", "This model continues code after comments."
        )
        await expect(box.locator("#as-chat")).not_to_be_checked()
        await box.locator("#as-chat").set_checked(True)
        async with box.expect_response("**/dashboard/data*"):
            pass  # the page asks again, and keeps what was chosen
        await expect(box.locator("#as-chat")).to_be_checked()


async def test_an_operators_limit_takes_the_depths_away(box: Page, services: Services) -> None:
    await expect(box.locator("#depths span")).to_have_text(["0", "1", "2", "3"])
    services.depth_limit.max_draft_tokens = 1
    await expect(box.locator("#depths span")).to_have_text(["0", "1"])
    await expect(box.locator("#legend li")).to_have_text(["by the model", "draft 1"])


async def test_the_state_follows_the_engine(box: Page, engine: FakeEngine) -> None:
    await expect(box.locator("#state")).to_have_text("serving")
    engine.state = "restarting"
    await expect(box.locator("#state")).to_have_text("restarting")
    await box.locator("#run").click()
    await expect(box.locator("#verdict[data-kind=error]")).to_contain_text("the engine is restarting")


async def test_a_stream_that_fails_says_why_and_keeps_what_came(box: Page, engine: FakeEngine) -> None:
    engine.die_after = 3
    await box.locator("#as-chat").set_checked(False)
    await box.locator("#run").click()
    await expect(box.locator("#verdict[data-kind=error]")).to_contain_text("the engine ended")
    assert await positions(box) == ["1", "2", "0"]
    await expect(box.locator("#run")).to_have_text("Generate")
