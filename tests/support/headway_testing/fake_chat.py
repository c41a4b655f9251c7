"""What stands in for ChatRenderer: a text of the messages, whatever marks are in them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headway.server.control_text import ChatPrompt
from headway.server.template_frames import MarkedMessages


class FakeChat(ABC):
    """Its texts keep the contents as they are."""

    @abstractmethod
    async def render(self, messages: list[dict[str, str]]) -> str: ...

    async def render_marked(self, messages: list[dict[str, str]], marked: MarkedMessages) -> ChatPrompt:
        replaced = marked.with_parts or marked.messages
        return ChatPrompt(await self.render(replaced), marked.mark, marked.spelled)


class FirstContent(FakeChat):
    async def render(self, messages: list[dict[str, str]]) -> str:
        return messages[0]["content"]


class JoinedContents(FakeChat):
    async def render(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)


class RoleLines(FakeChat):
    async def render(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages)
