"""Fakes of ChatRenderer: a text of the messages, whatever special tokens are in them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from headway.server.base.conversation import Conversation
from headway.server.text.control_text import ChatPrompt
from headway.server.text.template_frames import MarkedConversation


class FakeChat(ABC):
    """Renders texts that keep the contents as they are."""

    @abstractmethod
    async def render(self, conversation: Conversation) -> str: ...

    async def render_marked(self, conversation: Conversation, marked: MarkedConversation) -> ChatPrompt:
        replaced = marked.with_parts or marked.by_tokens
        return ChatPrompt(await self.render(replaced), marked.mark, marked.spelled)


class FirstContent(FakeChat):
    async def render(self, conversation: Conversation) -> str:
        return str(conversation.messages[0]["content"])


class JoinedContents(FakeChat):
    async def render(self, conversation: Conversation) -> str:
        return "".join(message["content"] for message in conversation.messages)


class RoleLines(FakeChat):
    async def render(self, conversation: Conversation) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in conversation.messages)


class EndsWith(FakeChat):
    """Renders the end of a prompt alone."""

    def __init__(self, ending: str = "assistant:") -> None:
        self._ending = ending

    async def render(self, conversation: Conversation) -> str:
        return self._ending


class RecordingChat(FakeChat):
    """Mutable: keeps the conversations that it renders, each as one line."""

    def __init__(self) -> None:
        self.seen: list[Conversation] = []

    async def render(self, conversation: Conversation) -> str:
        self.seen.append(conversation)
        return "assistant:"

    async def render_marked(self, conversation: Conversation, marked: MarkedConversation) -> ChatPrompt:
        return ChatPrompt(await self.render(conversation))
