"""The chat in one Chromium, which takes seconds to start, over a FakeEngine and a server of each test's
own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from headway_testing.browser import chromium
from headway_testing.chat_page import ChatPage
from headway_testing.chat_templates import byte_level
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.served import served
from headway_testing.tiny_tokenizers import save
from playwright.async_api import Browser, Page

from headway.engine import Submit
from headway.server.formats import find_format
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "<tool_call></think> enable_thinking"  # a model that calls tools and reasons
EXPECTED = (
    "status of 4",
    "status of 5",
    "ERR_FAILED",
)  # what Chromium itself says of answers that are refusals


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save(tmp_path_factory.mktemp("chat"), byte_level()))


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest.fixture
def answer(engine: FakeEngine, tokenizer: Tokenizer) -> Callable[..., None]:
    """Sets the texts of the next answers, one after the other; the last comes again and again."""

    def answer(*texts: str) -> None:
        waiting = [[*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]] for text in texts]

        def script(request: Submit) -> list[int]:
            return waiting.pop(0) if len(waiting) > 1 else waiting[0]

        engine.script = script

    return answer


@pytest_asyncio.fixture(loop_scope="session")
async def grammars(tokenizer: Tokenizer) -> AsyncIterator[Grammars]:
    grammars = Grammars(tokenizer.token_table(), INFO.vocab_size)
    yield grammars
    await grammars.close()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, grammars: Grammars, template: str) -> Services:
    metrics = Metrics(lambda: engine.stats, lambda: engine.num_restarts, tool_format="hermes")
    return Services(
        "tiny", engine, tokenizer, metrics, RecordingChat(), template_source=template,
        output_format=find_format(template), grammars=grammars,
    )  # fmt: skip


@pytest_asyncio.fixture(loop_scope="session")
async def address(services: Services) -> AsyncIterator[str]:
    async with served(services) as address:
        yield address


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def page(browser: Browser) -> AsyncIterator[Page]:
    """Of all tests: each opens it anew, at an origin of its own."""
    page = await browser.new_page(locale="en-GB", permissions=["clipboard-read", "clipboard-write"])
    yield page
    await page.close()


@pytest_asyncio.fixture(loop_scope="session")
async def chat(page: Page, address: str) -> AsyncIterator[ChatPage]:
    """The page, opened by the server's bare address. At the end nothing else may have been said on the
    console."""
    await page.set_viewport_size({"width": 1280, "height": 900})
    said: list[str] = []
    listeners = {
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    chat = ChatPage(page)
    await chat.open(address)
    yield chat
    await page.unroute_all()
    await page.goto("about:blank")
    chat.close()
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert [line for line in said if not any(part in line for part in EXPECTED)] == []
