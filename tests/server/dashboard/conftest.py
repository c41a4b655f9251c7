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
from headway_testing.fake_services import fake_services
from headway_testing.served import served
from headway_testing.tiny_tokenizers import save
from playwright.async_api import Browser, ConsoleMessage, Error, Page

from headway.engine import Submit
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
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
    return fake_services(engine, tokenizer, RecordingChat(), template=template, grammars=grammars)


@pytest_asyncio.fixture(loop_scope="session")
async def address(services: Services) -> AsyncIterator[str]:
    async with served(services) as address:
        yield address


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tab(browser: Browser) -> AsyncIterator[Page]:
    """Of all tests: a new one takes a fifth of a second."""
    tab = await browser.new_page(locale="en-GB", permissions=["clipboard-read", "clipboard-write"])
    yield tab
    await tab.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(tab: Page) -> AsyncIterator[Page]:
    """The tab, left empty and with nothing stored: a page that stayed would go on asking its server, which
    has ended, and a port may come again, with the same origin."""
    await tab.set_viewport_size({"width": 1280, "height": 900})
    yield tab
    await tab.unroute_all()
    await tab.goto("about:blank")
    await tab.emulate_media(color_scheme=None)
    session = await tab.context.new_cdp_session(tab)
    await session.send("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    await session.detach()


@pytest.fixture
def expected() -> tuple[str, ...]:
    """Parts of what the console may say: a file that expects no refusals has none."""
    return EXPECTED


@pytest_asyncio.fixture(loop_scope="session")
async def said(page: Page, address: str, expected: tuple[str, ...]) -> AsyncIterator[list[str]]:
    """Collects what the console says and of which address. At the end, with the page left while its server
    still answers, nothing else may have been said than what is expected."""
    said: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        said.append(f"{message.text} {message.location['url']}")

    def fail(error: Error) -> None:
        said.append(str(error))

    page.on("console", hear)
    page.on("pageerror", fail)
    yield said
    await page.unroute_all()
    await page.goto("about:blank")
    page.remove_listener("console", hear)
    page.remove_listener("pageerror", fail)
    assert [line for line in said if not any(part in line for part in expected)] == []


@pytest_asyncio.fixture(loop_scope="session")
async def chat(page: Page, address: str, said: list[str]) -> AsyncIterator[ChatPage]:
    """Yields the page, opened by the server's bare address."""
    chat = ChatPage(page)
    await chat.open(address)
    yield chat
    chat.close()
