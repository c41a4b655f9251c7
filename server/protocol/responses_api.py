"""POST /v1/responses: the body of a request. The objects of the answer are in responses_objects.py."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from headway.server.protocol import chat, other_names, parameters
from headway.server.protocol.chat import ContentPart
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.parameters import MAX_INTEGER, Ranges, SamplingFields
from headway.server.protocol.structured import JsonSchema
from headway.server.protocol.unserved import INPUT_ITEM, RESPONSES, RESPONSES_TOOL, Table

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
SUMMARIES = ("auto", "concise", "detailed")  # kinds of summaries of the reasoning
INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)


class ToolFormat(msgspec.Struct):
    """The format of a custom tool's input. type: text or grammar. syntax, definition: a grammar, which the
    model is told, but which is not enforced."""

    type: str | None = None
    syntax: str | None = None
    definition: str | None = None


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function, a custom tool, whose input is a text, a group of both (type namespace), or a client's
    search for tools.

    parameters: a JSON Schema of the arguments; None for a function without arguments. strict: the schema is
    enforced while arguments are generated; false if left out. format: of a custom tool. tools: of a
    namespace. execution: of a search. type: None only within items that are left out.
    """

    unserved: ClassVar[Table] = RESPONSES_TOOL

    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: ToolFormat | UnsetType = UNSET
    tools: list[ResponseTool] | UnsetType = UNSET
    execution: str | UnsetType = UNSET


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the conversation. Fields of other kinds of items are ignored, since their types are refused.

    type: None for a message. role, content: of a message; content is also the text of a reasoning item, for
    which encrypted_content, or else summary, is used if it is missing. call_id, name, namespace, arguments:
    of a function's call; call_id, output: of its result. input: of a custom tool's call. action: of a shell's
    call. tools: of the result of a search for tools, or of an item that adds tools; execution: who searched.
    """

    unserved: ClassVar[Table] = INPUT_ITEM
    passes_unknown: ClassVar[bool] = True

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: str | list[ContentPart] | None = None
    tools: list[ResponseTool] | None = None
    execution: str | None = None


class ToolReference(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    passes_unknown: ClassVar[bool] = True

    type: str
    name: str | None = None


class ChoiceOfTools(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One tool by its name (type function or custom), or some of the tools (type allowed_tools) by a mode,
    auto or required."""

    passes_unknown: ClassVar[bool] = True

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """type: text, json_object or json_schema. schema, name, strict, description: of a json_schema. strict:
    keywords that cannot be enforced are refused."""

    type: str | None = None
    name: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """summary: one of SUMMARIES, each for a copy of the whole reasoning; generate_summary: its earlier
    name. The last two are hints without effect."""

    effort: str | None = None
    summary: object = None
    generate_summary: object = None
    context: object = None
    mode: object = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options without effect: the last event always has the usage."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """store: no answer is stored, whatever it says. reasoning_effort: reasoning.effort under the name that
    it has in chats. The last four are fields of Headway and other servers, as in chats."""

    unserved: ClassVar[Table] = RESPONSES
    other_names: ClassVar[OtherNames] = other_names.RESPONSES

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ChoiceOfTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    thinking_budget_tokens: int | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def wants_carried_reasoning(self) -> bool:
        """Returns whether the client gets reasoning in a form that it can send back: it asks for it, or
        says that it stores the conversation itself."""
        return self.store is False or ENCRYPTED_REASONING in (self.include or ())

    @property
    def summary(self) -> str | None:
        """Returns the kind of summary of the reasoning that the client asks for."""
        asked = self.reasoning or ReasoningOptions()
        return next((kind for kind in SUMMARIES if kind in (asked.summary, asked.generate_summary)), None)


RANGES: Ranges = {
    name: limits for name, limits in (parameters.RANGES | chat.RANGES).items() if name in ResponsesRequest.__struct_fields__
} | {"max_output_tokens": (1, MAX_INTEGER)}  # fmt: skip
