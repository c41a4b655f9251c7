"""The answer of /v1/responses: its items, and the object that contains them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headway.server.protocol.chat import TokenLogprob
from headway.server.protocol.responses_api import ChoiceOfTools, ResponseTool, TextOptions
from headway.server.protocol.usage import SpeculationReport


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """logprobs: those of the text's tokens, if requested."""

    text: str
    logprobs: list[TokenLogprob] = []
    annotations: list[str] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """status: in_progress, completed or incomplete, as for all items."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's whole reasoning in clear text. summary: a copy of it, if requested. encrypted_content: a
    copy for clients that send back nothing else, if requested and the item is complete."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[SummaryText] = []
    encrypted_content: str | None = None


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """arguments: JSON as text, as the model wrote it; an object of the schema only if that is enforced.
    namespace: the group of the function, if it is in one."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool whose input is a text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class SearchCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="tool_search_call"):
    """A call of the client's search for tools."""

    id: str
    status: str
    call_id: str
    arguments: dict[str, Any]
    execution: str = "client"


CallItem = FunctionCallItem | CustomCallItem | SearchCallItem
Item = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens that came from the prefix cache. cache_write_tokens: priced elsewhere,
    always 0 here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: those between the delimiters of the reasoning; 0 if the delimiters are no tokens
    of the model."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(msgspec.Struct):
    """code: server_error, rate_limit_exceeded or invalid_prompt, OpenAI's codes. The message is more
    specific."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ReasoningEcho(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """output: complete items. usage, completed_at: None until the answer has ended; completed_at and
    created_at are Unix seconds. Most other fields repeat the request; null means that it left them out and
    the server has no value for them."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool = False
    background: bool = False
    temperature: float
    text: TextOptions
    tool_choice: str | ChoiceOfTools
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    user: str | None
    speculation: SpeculationReport | UnsetType = UNSET
