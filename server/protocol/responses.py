"""POST /v1/responses: what a client asks. The answer's objects are in response_objects.py."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from headway.server.protocol import chat, other_names, parameters
from headway.server.protocol.chat import ContentPart
from headway.server.protocol.other_names import OtherNames
from headway.server.protocol.parameters import MAX_INTEGER, Ranges, SamplingFields
from headway.server.protocol.structured import JsonSchema
from headway.server.protocol.unserved import INPUT_ITEM, RESPONSES, RESPONSES_TOOL, Table

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """An item of the conversation; fields of other kinds of items are ignored, for their type is refused.

    type: None for a message. role, content: of a message; content is also the text of an item of reasoning, whose
    encrypted_content, else its summary, takes its place where it is missing. call_id, name, arguments: of a function's call; call_id, output: of its result.
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
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """parameters: a JSON Schema of the arguments; None for a function that takes none. strict: arguments are held against
    it while they are generated; false if left out."""

    unserved: ClassVar[Table] = RESPONSES_TOOL

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolReference(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    passes_unknown: ClassVar[bool] = True

    type: str
    name: str | None = None


class ChoiceOfTools(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One function by its name (type function), or some of the tools (type allowed_tools) by a mode, auto or required."""

    passes_unknown: ClassVar[bool] = True

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ToolReference] | None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """type: text, json_object or json_schema. schema, name, strict, description: of a json_schema, which is enforced
    whatever `strict` says."""

    type: str | None = None
    name: str | None = None
    schema: JsonSchema | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """The fields other than effort are hints that change nothing here: reasoning is told as it is."""

    effort: str | None = None
    summary: object = None
    generate_summary: object = None
    context: object = None
    mode: object = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Neither changes anything: the last event always has the usage."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None


class ResponsesRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """store: no answer is kept, whatever it says. reasoning_effort: reasoning.effort, as chats have it.
    The last four: Headway's and other servers' own fields, as in chats."""

    unserved: ClassVar[Table] = RESPONSES
    other_names: ClassVar[OtherNames] = other_names.RESPONSES

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
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
        """Whether the client is to get reasoning in a form that it sends back: it asks for it, or says that it keeps the conversation
        itself."""
        return self.store is False or ENCRYPTED_REASONING in (self.include or ())


RANGES: Ranges = {
    name: limits for name, limits in (parameters.RANGES | chat.RANGES).items() if name in ResponsesRequest.__struct_fields__
} | {"max_output_tokens": (1, MAX_INTEGER)}  # fmt: skip
