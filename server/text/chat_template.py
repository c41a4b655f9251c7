"""Renders messages to the text of a prompt, by the chat template in the model's files.

The template runs in a process of its own (template_worker.py), with limits of time, memory and size.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.engine import ConfigError, ModelError, read_text
from headway.server.base.conversation import Conversation, difference
from headway.server.base.errors import ApiError
from headway.server.base.worker_pool import Purpose, WorkerPool
from headway.server.text.control_text import ChatPrompt
from headway.server.text.model_defaults import read_tokenizer_config, token_content
from headway.server.text.template_frames import MarkedConversation, Rendered, RenderJob

WORKER_COMMAND = (sys.executable, "-P", "-m", "headway.server.text.template_worker")
# Its libraries must start no thread pools, whose reserved memory would count as memory in use.
WORKER_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
RENDER_SECONDS = 5.0  # processor time
QUICK_SECONDS = 0.1

logger = logging.getLogger("headway.server")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The source of a template, and the special tokens that it may name. tool_source: a separate template for
    conversations with tools, if the model's files have one.

    stop_strings: these end an answer; a template that separates messages by plain text needs them. note: a
    remark for users on the model's chats. Both are Headway's own fields, beside a named template in
    tokenizer_config.json.
    """

    source: str
    variables: dict[str, str]
    tool_source: str | None = None
    stop_strings: tuple[str, ...] = ()
    note: str | None = None

    @property
    def text(self) -> str:
        """Returns the sources of all templates."""
        return self.source + (self.tool_source or "")

    def source_for(self, conversation: Conversation) -> str:
        return self.source if self.tool_source is None or not conversation.tools else self.tool_source


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """Returns the template of `file`, else of chat_template.jinja, else of tokenizer_config.json; None if
    there is none. Raises ModelError, and ConfigError for `file`."""
    config = read_tokenizer_config(folder)
    entry: Mapping[str, object] = {}
    tool_source = None
    if file is not None:
        source: str | None = read_template(file)
    else:
        source = read_text(folder / "chat_template.jinja")
        tool_source = read_text(folder / "additional_chat_templates" / "tool_use.jinja")
        if source is None:
            named = _named(config.get("chat_template"))
            entry = named.get("default", {})
            source, tool_source = _string(entry, "template"), _string(named.get("tool_use", {}), "template")
    if source is None:
        return None
    tokens = {name: token_content(token) for name, token in config.items() if name.endswith("_token")}
    variables = {name: token for name, token in tokens.items() if token is not None}
    stop = entry.get("stop_strings")
    stop_strings = (
        tuple(text for text in stop if isinstance(text, str) and text) if isinstance(stop, list) else ()
    )
    return ChatTemplate(source, variables, tool_source, stop_strings, _string(entry, "note"))


def _named(template: object) -> dict[object, Mapping[str, object]]:
    """Returns the templates by name: a string is the default, a list has objects with name and template."""
    if isinstance(template, list):
        return {entry.get("name"): entry for entry in reversed(template) if isinstance(entry, dict)}
    return {"default": {"template": template}}


def _string(entry: Mapping[str, object], name: str) -> str | None:
    value = entry.get(name)
    return value if isinstance(value, str) else None


def read_template(file: Path) -> str:
    """Returns the text of --chat-template. Raises ConfigError."""
    try:
        source, reason = read_text(file), "there is no such file"
    except ModelError as error:
        source, reason = None, str(error)
    if source is None:
        raise ConfigError(
            f"--chat-template is {str(file)!r}, it must be a file that holds a Jinja template: {reason}"
        )
    return source


class ChatRenderer:
    """Mutable: owns the pool in which the template runs."""

    def __init__(self, template: ChatTemplate, *, render_seconds: float = RENDER_SECONDS) -> None:
        self._template = template
        self._render_seconds = render_seconds
        purpose = Purpose(
            "renders chat templates",
            code="chat_template_unavailable",
            seconds=render_seconds,
            quick_seconds=QUICK_SECONDS,
            hello=bytes,
            environment=WORKER_ENVIRONMENT,
        )
        self._pool = WorkerPool(WORKER_COMMAND, purpose)

    async def render(self, conversation: Conversation) -> str:
        """Raises ApiError if the template refuses the conversation, fails, takes too long or writes too
        much."""
        return _text(await self._ask(conversation, None), conversation)

    async def render_marked(self, conversation: Conversation, marked: MarkedConversation) -> ChatPrompt:
        """Returns the text of the conversation with marks where clients spelled structural tokens.

        Raises ApiError as `render` does, and if the template inspects such a token, so that its origin is
        unknown.
        """
        answer = await self._ask(conversation, marked)
        if answer.inspected is not None:
            raise _inspected(conversation, marked, answer.inspected)
        return ChatPrompt(_text(answer, conversation), marked.mark, marked.spelled)

    async def warm_up(self) -> None:
        """Starts the worker before the first request needs it, and warns of a template that cannot be
        compiled."""
        error = await self.syntax_error()
        if error is not None:
            logger.warning(
                "the model's chat template is not valid (%s); every chat will be refused, completions are served; "
                "fetch chat_template.jinja or tokenizer_config.json again, or use --chat-template",
                error,
            )

    async def syntax_error(self) -> str | None:
        """Returns why the template cannot be compiled; None if it can. Other failures without messages do
        not matter."""
        with suppress(ApiError):
            for conversation in (Conversation([]), Conversation([], tools=[{}])):
                answer = await self._ask(conversation, None)
                if answer.error is not None and answer.error.startswith("TemplateSyntaxError"):
                    return answer.error
        return None

    async def close(self) -> None:
        await self._pool.close()

    async def _ask(self, conversation: Conversation, marked: MarkedConversation | None) -> Rendered:
        source = self._template.source_for(conversation)
        job = RenderJob(source, self._template.variables, conversation, marked)
        outcome = await self._pool.run(msgspec.json.encode(job))
        if outcome.is_too_slow:
            limit = f"the limit is {self._render_seconds:g} s of processor time; send less"
            raise _refusal(f"takes too long over these messages, {limit}")
        if outcome.exit_code:
            raise _refusal("ended its process over these messages; send less")
        return msgspec.json.decode(outcome.payload, type=Rendered)


def _text(answer: Rendered, conversation: Conversation) -> str:
    if answer.text is not None:
        return answer.text
    message = f"the model's chat template does not take these messages: {answer.error}"
    odd = next((i for i, one in enumerate(conversation.messages) if _has_odd_arguments(one)), None)
    if odd is not None:
        message += f"; the arguments of a call in messages[{odd}] are no JSON object, which it may need"
    param = "messages" if odd is None else f"messages[{odd}]"
    raise ApiError(message, param=param, code="chat_template_error")


def _has_odd_arguments(message: Mapping[str, Any]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls") or ())


def _inspected(
    conversation: Conversation, marked: MarkedConversation, place: tuple[str, int | str]
) -> ApiError:
    pairs = zip(conversation.entries(), marked.by_tokens.entries(), strict=True)
    entry, replaced = next(
        (entry, other) for (part, key, entry), (_, _, other) in pairs if (part, key) == place
    )
    part, key = place
    found = difference(entry, replaced, f"{part}[{key}]" if isinstance(key, int) else f"{part}.{key}")
    assert found is not None, place
    path, text = found
    token = next(
        text for text, is_spelled in ChatPrompt(text, marked.mark, marked.spelled).pieces() if is_spelled
    )
    return ApiError(
        f"{path} has {token!r}, a structural token of this model that only its chat template may write, and the "
        f"template treats {part} that have it differently; leave it out or write it in another way",
        param=path,
        code="structural_token",
    )


def _refusal(what: str) -> ApiError:
    return ApiError(f"the model's chat template {what}", param="messages", code="chat_template_error")
