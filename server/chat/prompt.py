"""Turns conversations into prompts: checks them, keeps clients' text literal, and calls the chat template."""

from __future__ import annotations

import asyncio

from headway.server.base.conversation import Conversation, is_nested_beyond
from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.formats.call_ids import with_call_ids
from headway.server.protocol.chat import ConversationFields, conversation_of
from headway.server.requests.services import Services
from headway.server.text.chat_template import ChatRenderer
from headway.server.text.control_text import ChatPrompt
from headway.server.text.escaping import Escaper
from headway.server.text.reasoning_effort import with_effort
from headway.server.text.template_frames import MarkedConversation
from headway.server.text.template_limits import folded, is_plain
from headway.server.text.tokenizer import Tokenizer

MAX_NESTING = 64
MAX_TOOL_NESTING = (
    136  # the 64 levels of its schema, each within a map or a list, and the levels around the schema
)
THREAD_CHARACTERS = 8192  # longer chats are searched for structural tokens off the event loop
# Variables that the renderer itself gives to a template, and the field that a client should use instead.
OWN_NAMES = {
    "messages": "messages", "conversations": "messages", "tools": "tools", "documents": "documents",
    "add_generation_prompt": "add_generation_prompt", "continue_final_message": "continue_final_message",
}  # fmt: skip
RENDERER_NAMES = frozenset({
    "chat_template", "return_assistant_tokens_mask", "self", "raise_exception", "strftime_now", "namespace", "dict",
    "range", "lipsum", "cycler", "joiner", "loop", "caller", "varargs", "kwargs",
})  # fmt: skip


def conversation_for(body: ConversationFields, services: Services) -> Conversation:
    """Returns the input of the model's chat template for a body."""
    conversation = with_effort(conversation_of(body), body.reasoning_effort, services.template_source)
    return with_call_ids(conversation, services.output_format.call_id_length)


async def chat_prompt(
    conversation: Conversation, services: Services, ignored: list[str] | None = None
) -> ChatPrompt:
    """Returns the prompt of a conversation, in the form that the model's template accepts. Raises ApiError
    for a model without a template.

    ignored: receives the paths of what the template cannot show.
    """
    if services.chat is None:
        raise ApiError(
            f"the model '{services.model_name}' has no chat template: it continues text and cannot chat; use "
            "POST /v1/completions, or serve a model whose files have a chat_template",
            param="model",
            code="chat_not_supported",
        )
    if is_plain(conversation):
        return await _rendered(conversation, services.chat, services.tokenizer)
    limits = await services.template_limits.of(services.chat.render, has_tools=bool(conversation.tools))
    fold = folded(conversation, limits)
    if ignored is not None:
        ignored += fold.dropped
    names = FieldNames({f"messages[{i}]": f"messages[{origin}]" for i, origin in enumerate(fold.origins)})
    with names.telling():
        return await _rendered(fold.conversation, services.chat, services.tokenizer)


async def _rendered(conversation: Conversation, chat: ChatRenderer, tokenizer: Tokenizer) -> ChatPrompt:
    escaper = Escaper(tokenizer.control_pattern, tokenizer.control_parts)
    if _is_short(conversation):
        marked = _checked_and_marked(conversation, escaper)
    else:
        marked = await asyncio.to_thread(_checked_and_marked, conversation, escaper)
    if marked is None:
        return ChatPrompt(await chat.render(conversation))
    return await chat.render_marked(conversation, marked)


def _is_short(conversation: Conversation) -> bool:
    """Returns whether the conversation is searched quickly: its texts are short, and nothing is nested."""
    values = [value for message in conversation.messages for value in message.values() if value is not None]
    values += [
        value for value in conversation.template_variables.values() if isinstance(value, str | list | dict)
    ]
    is_flat = (
        not conversation.tools and not conversation.documents and all(isinstance(v, str) for v in values)
    )
    return is_flat and sum(map(len, values)) <= THREAD_CHARACTERS


def _checked_and_marked(conversation: Conversation, escaper: Escaper) -> MarkedConversation | None:
    _check(conversation)
    return escaper.marked(conversation)


def _check(conversation: Conversation) -> None:
    if conversation.adds_generation_prompt and conversation.continues_final_message:
        raise ApiError(
            "continue_final_message and add_generation_prompt are both true, one of them must be false: a prompt "
            "either goes on with the last message or begins a new answer",
            param="continue_final_message",
            code="invalid_value",
        )
    for part, key, entry in conversation.entries():
        most = MAX_TOOL_NESTING if part == "tools" else MAX_NESTING
        if is_nested_beyond(entry, most):
            path = f"{part}[{key}]" if isinstance(key, int) else f"{part}.{key}"
            limit = f"it may have {most} levels of objects and arrays at most"
            message = f"{path} is nested too deeply, {limit}; send a simpler value"
            raise ApiError(message, param=path, code="invalid_value")
    for name in conversation.template_variables:
        _check_variable(name)
    if conversation.continues_final_message:
        _check_final_message(conversation)


def _check_variable(name: str) -> None:
    """Refuses variables that would replace what the renderer gives to every template."""
    path = f"chat_template_kwargs.{name[:64]}"
    if name in OWN_NAMES:
        remedy = f"use the field {OWN_NAMES[name]} of the request"
    elif name in RENDERER_NAMES or name.endswith("_token"):
        remedy = "leave it out"
    elif name.isidentifier() and not name.startswith("_"):
        return
    else:
        message = (
            f"{path} is no name of a template's variable; use letters, digits and underscores, a letter first"
        )
        raise ApiError(message, param="chat_template_kwargs", code="invalid_value")
    message = f"{path} would replace what the server itself gives to the chat template; {remedy}"
    raise ApiError(message, param=path, code="invalid_value")


def _check_final_message(conversation: Conversation) -> None:
    last = conversation.messages[-1] if conversation.messages else {}
    path = f"messages[{len(conversation.messages) - 1}]"
    role = last.get("role")
    if role != "assistant":
        raise ApiError(
            f"continue_final_message is true and {path}.role is {role!r}, it must be 'assistant': the answer that is to "
            "be continued comes last",
            param="continue_final_message",
            code="invalid_value",
        )
    if not isinstance(last.get("content"), str):
        raise ApiError(
            f"continue_final_message is true and {path} has no content to continue; send the beginning of the answer",
            param="continue_final_message",
            code="invalid_value",
        )
