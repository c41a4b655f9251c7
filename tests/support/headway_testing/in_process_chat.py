"""A ChatRenderer that renders in the test's process and keeps its jobs."""

from __future__ import annotations

from headway.server.base.conversation import Conversation
from headway.server.text import template_worker
from headway.server.text.chat_template import ChatRenderer, ChatTemplate
from headway.server.text.control_text import ChatPrompt
from headway.server.text.escaping import Escaper
from headway.server.text.template_frames import MarkedConversation, Rendered, RenderJob
from headway.server.text.tokenizer import Tokenizer


class InProcessChat(ChatRenderer):
    def __init__(self, source: str, variables: dict[str, str] | None = None) -> None:
        super().__init__(ChatTemplate(source, variables or {}))
        self.jobs: list[RenderJob] = []

    async def _ask(self, conversation: Conversation, marked: MarkedConversation | None) -> Rendered:
        self.jobs.append(RenderJob(self._template.source, self._template.variables, conversation, marked))
        return template_worker.render(self.jobs[-1])


async def rendered(
    conversation: Conversation, source: str, tokenizer: Tokenizer, variables: dict[str, str] | None = None
) -> ChatPrompt:
    """Returns the prompt as the routes make it."""
    chat = InProcessChat(source, variables)
    marked = Escaper(tokenizer.control_pattern, tokenizer.control_parts).marked(conversation)
    if marked is None:
        return ChatPrompt(await chat.render(conversation))
    return await chat.render_marked(conversation, marked)


def text_of(source: str, conversation: Conversation, variables: dict[str, str] | None = None) -> str:
    """Returns the text without special tokens."""
    text = template_worker.render(RenderJob(source, variables or {}, conversation)).text
    assert text is not None
    return text
