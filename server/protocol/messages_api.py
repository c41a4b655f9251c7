"""POST /v1/messages and /v1/messages/count_tokens: bodies and events of Anthropic's Messages API.

The package messages_api translates the fields to those of a chat.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from headway.server.protocol import other_names
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.parameters import RANGES as CHAT_RANGES
from headway.server.protocol.unserved import (
    MESSAGES,
    MESSAGES_BLOCK,
    MESSAGES_OUTPUT,
    MESSAGES_THINKING,
    Table,
)

RANGES = {name: CHAT_RANGES[name] for name in ("temperature", "top_p", "top_k")}
ROLES = ("user", "assistant", "system")
BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking", "tool_reference")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "adaptive", "disabled")
DISPLAYS = ("summarized", "updates", "omitted")
# Types of tool_choice, and their names in a chat.
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The accepted edits, which have no effect: the chat template decides which thoughts of earlier turns the
# model sees.
EDITS = ("clear_thinking_20251015",)


class MessagesBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A block of content of any type; each type has some of the fields. Other fields carry no text and are
    ignored.

    input: of a tool_use. content, is_error: of a tool_result. thinking: of a thinking block. tool_name: of a
    tool_reference.
    """

    unserved: ClassVar[Table] = MESSAGES_BLOCK
    passes_unknown: ClassVar[bool] = True

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[MessagesBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    tool_name: str | None = None


Content = str | list[MessagesBlock]


class MessagesTurn(msgspec.Struct, forbid_unknown_fields=True):
    passes_unknown: ClassVar[bool] = True

    role: str
    content: Content


class MessagesTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool. type: custom, or None for it; other types, which have other fields, are refused by name.
    Further fields that clients store with a tool are ignored.

    input_schema: a JSON Schema of the arguments. strict: the schema is enforced while arguments are
    generated.
    """

    passes_unknown: ClassVar[bool] = True

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """type: auto, any, tool (then name is the tool's) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesThinking(msgspec.Struct, forbid_unknown_fields=True):
    """type: enabled, adaptive or disabled. display: summarized, updates, or omitted for thinking blocks
    without their text."""

    unserved: ClassVar[Table] = MESSAGES_THINKING

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class MessagesFormat(msgspec.Struct, forbid_unknown_fields=True):
    """type: always json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class MessagesOutput(msgspec.Struct, forbid_unknown_fields=True):
    unserved: ClassVar[Table] = MESSAGES_OUTPUT

    effort: str | None = None
    format: MessagesFormat | None = None


class MessagesEdit(msgspec.Struct, forbid_unknown_fields=True):
    passes_unknown: ClassVar[bool] = True

    type: str


class MessagesContext(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[MessagesEdit] | None = None


class PromptFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of the prompt. output_format: the earlier name of output_config.format. thread: a
    conversation stored by the server, which is refused."""

    unserved: ClassVar[Table] = MESSAGES

    model: str | None = None
    messages: list[MessagesTurn]
    system: Content | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutput | None = None
    output_format: MessagesFormat | None = None
    context_management: MessagesContext | None = None
    thread: object = None


class MessagesCountRequest(PromptFields, forbid_unknown_fields=True, kw_only=True):
    pass


class MessagesRequest(PromptFields, forbid_unknown_fields=True, kw_only=True):
    other_names: ClassVar[OtherNames] = other_names.MESSAGES

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None


class MessagesCount(msgspec.Struct):
    input_tokens: int


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """signature: a hash of the text, which nothing checks."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """input: a JSON object, as the model wrote it."""

    id: str
    name: str
    input: Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessagesUsage(msgspec.Struct):
    """input_tokens and cache_read_input_tokens together are the tokens of the prompt; the latter came from
    the prefix cache.

    output_tokens_details: only for models that reason and have tokens as delimiters.
    """

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class MessagesAnswer(msgspec.Struct, tag_field="type", tag="message"):
    """stop_reason: None only at the start of a stream."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessagesUsage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: str = "assistant"


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: MessagesAnswer


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
