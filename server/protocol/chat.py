"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from headway.engine import MAX_LOGPROBS
from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.protocol import other_names
from headway.server.protocol.checks import check_count, missing, require
from headway.server.protocol.media import MEDIA, last_question, media_line
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.parameters import (
    MAX_INTEGER,
    GenerationFields,
    Ranges,
    check_generation,
    check_ranges,
)
from headway.server.protocol.tools import (
    FunctionCall,
    Tool,
    ToolCall,
    ToolChoice,
    check_tools,
    template_calls,
    template_tools,
)
from headway.server.protocol.unserved import CHAT, CONTENT_PART, MESSAGE, Table
from headway.server.protocol.usage import DraftPositions, SpeculationReport, Usage

MAX_MESSAGES = 4096
MAX_DOCUMENTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Roles that chat templates know by another name. `function` is an earlier name of `tool`.
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
RESULT_ROLES = ("tool", "function")
TEXT_TYPES = ("text", "input_text", "output_text")
# Parts of an assistant's content in which clients store its reasoning; they do not belong to its answer.
THOUGHT_TYPES = ("thinking", "redacted_thinking", "reasoning")


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content. Only text is served; other fields of a text part carry no text and
    are ignored. encrypted_content: of a message between agents in /v1/responses, which a model of this
    server wrote in clear text."""

    unserved: ClassVar[Table] = CONTENT_PART
    passes_unknown: ClassVar[bool] = True

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: object = None
    input_audio: object = None
    file: object = None
    encrypted_content: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message. content: optional for an assistant, whose refusal then is the text, and for the result of a
    call.

    tool_calls, function_call, reasoning_content and its other name reasoning: of an assistant. tool_call_id:
    of a result.
    """

    unserved: ClassVar[Table] = MESSAGE

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: object = None
    reasoning: object = None

    @property
    def thoughts(self) -> str | None:
        """Returns the assistant's reasoning before its answer, if the client stored it as a text."""
        texts = [text for text in (self.reasoning_content, self.reasoning) if isinstance(text, str) and text]
        return texts[0] if texts else None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """The predicted answer, such as a file of which a few lines change. type: "content"."""

    content: str | list[ContentPart]
    type: str = "content"


class ChatRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    unserved: ClassVar[Table] = CHAT
    other_names: ClassVar[OtherNames] = other_names.CHAT

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None

    @property
    def token_limit(self) -> int | None:
        """Returns max_completion_tokens, or max_tokens, its earlier name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


RANGES: Ranges = {
    "max_tokens": (1, MAX_INTEGER),
    "max_completion_tokens": (1, MAX_INTEGER),
    "top_logprobs": (0, MAX_LOGPROBS),
    "thinking_budget_tokens": (-1, MAX_INTEGER),
}


def check(request: ChatRequest) -> None:
    """Refuses values out of range and unserved fields, each by name."""
    check_generation(request)
    check_ranges(request, RANGES)
    require(
        request.max_tokens in (None, request.token_limit),
        "max_tokens",
        request.max_tokens,
        f"max_completion_tokens = {request.max_completion_tokens}, or left out",
    )
    if request.top_logprobs and not request.logprobs:
        message = "top_logprobs is only allowed when logprobs is true"
        raise ApiError(message, param="top_logprobs", code="invalid_value")
    check_tools(request.tools, request.tool_choice)
    check_effort(request.reasoning_effort)


def check_effort(effort: str | None) -> None:
    known = effort is None or effort in EFFORTS
    require(known, "reasoning_effort", repr(effort), f"one of {', '.join(EFFORTS)}")


def predicted_text(request: ChatRequest) -> str | None:
    """Returns the predicted answer; None without one. Several parts are joined with nothing between them,
    as in the answer."""
    prediction = request.prediction
    if prediction is None:
        return None
    where = "prediction.content"
    require(prediction.type == "content", "prediction.type", repr(prediction.type), "'content'")
    return _text(prediction.content, where, is_assistant=False, must_show=True, between="")


class ConversationFields(Protocol):
    """The fields of a body that define its conversation."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def documents(self) -> list[dict[str, Any]] | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...


def conversation_of(body: ConversationFields) -> Conversation:
    """Returns the input of the chat template. Continuing the final message replaces the prompt for an
    answer, unless the body asks for both, which rendering refuses."""
    messages = body.messages or []
    check_messages(messages)
    check_count("documents", body.documents, MAX_DOCUMENTS, "documents")
    continues = bool(body.continue_final_message)
    adds = body.add_generation_prompt
    return Conversation(
        messages=template_messages(messages),
        tools=template_tools(body.tools),
        documents=body.documents or None,
        template_variables=dict(body.chat_template_kwargs or {}),
        adds_generation_prompt=not continues if adds is None else adds,
        continues_final_message=continues,
    )


def check_messages(messages: Sequence[object]) -> None:
    require(len(messages) > 0, "messages", "empty", "a list of 1 message or more")
    check_count("messages", messages, MAX_MESSAGES, "messages")


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Returns the messages as chat templates expect them: contents as strings, no developers, and calls
    with their arguments as objects."""
    last = last_question([message.role for message in messages])
    return [
        _template_message(message, f"messages[{i}]", is_question=i == last)
        for i, message in enumerate(messages)
    ]


def hidden_media(messages: Sequence[Message]) -> list[str]:
    """Returns the paths of the parts that a line replaces."""
    last = last_question([message.role for message in messages])
    return [
        f"messages[{i}].content[{j}]"
        for i, message in enumerate(messages)
        if isinstance(message.content, list) and not _must_show(message, is_question=i == last)
        for j, part in enumerate(message.content)
        if part.type in MEDIA
    ]


def _must_show(message: Message, *, is_question: bool) -> bool:
    """Returns whether the message must be shown in full. A client can leave its parts out, but keeps the
    earlier turns as a history."""
    return is_question or message.role in ("system", "developer")


def _template_message(message: Message, where: str, *, is_question: bool) -> dict[str, Any]:
    require(
        message.role in ROLES, f"{where}.role", repr(message.role), f"one of {', '.join(map(repr, ROLES))}"
    )
    is_assistant = message.role == "assistant"
    must_show = _must_show(message, is_question=is_question)
    if message.content is None and not is_assistant and message.role not in RESULT_ROLES:
        raise missing(f"{where}.content")
    content = _text(message.content or "", f"{where}.content", is_assistant=is_assistant, must_show=must_show)
    plain: dict[str, Any] = {
        "role": TEMPLATE_ROLES.get(message.role, message.role),
        "content": content or (is_assistant and message.refusal) or "",
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None and message.role in RESULT_ROLES:
        plain["tool_call_id"] = message.tool_call_id
    if calls := _calls(message, where):
        plain["tool_calls"] = calls
    if is_assistant and message.thoughts is not None:
        # Templates read it under one of these names: most under the first, those of gpt-oss under the last.
        plain |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.thoughts)
    return plain


def _calls(message: Message, where: str) -> list[dict[str, Any]]:
    """Returns the calls of an assistant's message; `function_call` is the earlier name of `tool_calls`."""
    for name in ("tool_calls", "function_call"):
        path = f"{where}.{name}"
        is_absent = not getattr(message, name) or message.role == "assistant"
        require(
            is_absent, path, "given", f"left out where the role is {message.role!r}: calls are an assistant's"
        )
    calls = list(message.tool_calls or ())
    if message.function_call is None:
        return template_calls(calls, f"{where}.tool_calls")
    require(not calls, f"{where}.function_call", "given", "left out beside tool_calls")
    return template_calls([ToolCall(message.function_call)], f"{where}.function_call")


def _text(
    content: str | list[ContentPart], where: str, *, is_assistant: bool, must_show: bool, between: str = "\n"
) -> str:
    """Returns the text of a content. The parts of a list are joined by `between`."""
    if isinstance(content, str):
        return content
    lines = []
    for i, part in enumerate(content):
        if is_assistant and part.type in THOUGHT_TYPES:
            continue
        if part.type in MEDIA:
            lines.append(media_line(part.type, f"{where}[{i}].type", must_show=must_show))
            continue
        field = "refusal" if is_assistant and part.type == "refusal" else "text"
        is_text = part.type in TEXT_TYPES or field == "refusal"
        text = getattr(part, field)
        if not is_text or (part.image_url, part.input_audio, part.file) != (None, None, None):
            path = f"{where}[{i}].type"
            message = f"{path} is {part.type!r}; this server reads parts of type 'text' that have a text and nothing else"
            raise ApiError(message, param=path, code="unsupported_content")
        if text is None:
            raise missing(f"{where}[{i}].{field}")
        lines.append(text)
    return between.join(lines)


class TopLogprob(msgspec.Struct):
    """bytes: those of the token; in `token`, incomplete characters are replacement characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    """arguments: JSON as text, as the model wrote it; an object of the schema only if that is enforced."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct):
    """content: null if there are only calls. reasoning_content, reasoning: the same text under both its
    names; only for models that reason, null if the model did not."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    speculation: DraftPositions | UnsetType = UNSET
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    speculation: SpeculationReport | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class DeltaCall(msgspec.Struct):
    """A complete call. index: its place among the calls of its choice."""

    index: int
    id: str
    function: AnswerFunction
    type: str = "function"


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    speculation: DraftPositions | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
