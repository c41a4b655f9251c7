"""GET /v1/models: one entry with the fields of OpenAI, vLLM, OpenRouter and Anthropic, whose names differ."""

from __future__ import annotations

import msgspec


class Support(msgspec.Struct):
    supported: bool


class ContextCapability(Support):
    clear_thinking_20251015: Support


class EffortCapability(Support):
    """The levels of output_config.effort that the model distinguishes."""

    low: Support
    medium: Support
    high: Support
    xhigh: Support
    max: Support


class ServerTools(Support):
    code_execution: Support
    web_search: Support


class ThinkingTypes(msgspec.Struct):
    adaptive: Support
    between_tools: Support
    disabled: Support
    enabled: Support


class ThinkingCapability(Support):
    types: ThinkingTypes


class Capabilities(msgspec.Struct):
    """Anthropic's description of a model's capabilities."""

    batch: Support
    citations: Support
    code_execution: Support
    context_management: ContextCapability
    effort: EffortCapability
    image_input: Support
    pdf_input: Support
    server_tools: ServerTools
    structured_outputs: Support
    thinking: ThinkingCapability


class Modalities(msgspec.Struct):
    """OpenRouter's description of inputs and outputs."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelCard(msgspec.Struct, kw_only=True):
    """max_model_len (vLLM), context_length (OpenRouter), max_input_tokens and max_tokens (Anthropic): the
    model's context in tokens, which prompt and answer share; None while it loads. supported_parameters:
    OpenRouter's, fields of a chat.
    """

    id: str
    created: int
    max_model_len: int | None
    context_length: int | None
    max_input_tokens: int | None
    max_tokens: int | None
    object: str = "model"
    owned_by: str = "headway"
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    architecture: Modalities
    supported_parameters: list[str]
    capabilities: Capabilities


class ModelList(msgspec.Struct, kw_only=True):
    """has_more, first_id, last_id: Anthropic's fields; the list is always complete."""

    data: list[ModelCard]
    object: str = "list"
    has_more: bool = False
    first_id: str
    last_id: str
