"""The chat of the live page, as tests use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Locator, Page, Request, expect

COMPLETIONS = "**/v1/chat/completions"


@dataclass
class ChatPage:
    """Drives the chat. bodies: the requests for answers. Mutable: its page appends to them."""

    page: Page
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", self._note)

    def _note(self, request: Request) -> None:
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(request.post_data_json)

    def close(self) -> None:
        self.page.remove_listener("request", self._note)

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    @property
    def input(self) -> Locator:
        return self.find("#chat-input")

    @property
    def answers(self) -> Locator:
        return self.find(".answer")

    async def open(self, address: str) -> None:
        await self.page.goto(f"{address}/")
        await expect(self.find("#state")).to_have_text("serving")
        await expect(self.find("#chat-drafts option")).to_have_count(5)

    async def ask(self, text: str) -> Locator:
        """Sends a message and returns its answer once it has ended."""
        await self.send(text)
        return await self.ended()

    async def send(self, text: str) -> None:
        await self.input.fill(text)
        await self.input.press("Enter")

    async def ended(self) -> Locator:
        await expect(self.find("#chat-send")).to_be_visible()
        return self.answers.last

    async def set(self, name: str, value: str) -> None:
        """Fills a setting as a person does, who leaves the field then."""
        await self.find(f"#chat-{name}").fill(value)
        await self.find(f"#chat-{name}").blur()

    async def texts(self) -> list[str]:
        """Returns the texts of the questions and answers."""
        return await self.find(".message > .text").all_text_contents()

    async def runs(self, selector: str) -> list[tuple[str, int]]:
        """Returns the spans of a coloured text, each with its draft position."""
        found = await self.find(f"{selector} span").evaluate_all(
            "spans => spans.map(span => [span.textContent, Number(span.dataset.position)])"
        )
        return [(text, position) for text, position in found if text]
