"""The capabilities of the served model, as OpenRouter and Anthropic describe them."""

from __future__ import annotations

from headway.server.protocol.models import (
    Capabilities,
    ContextCapability,
    EffortCapability,
    ServerTools,
    Support,
    ThinkingCapability,
    ThinkingTypes,
)
from headway.server.requests.services import Services
from headway.server.text.reasoning_effort import effort_variables

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "logprobs",
    "top_logprobs", "max_tokens", "seed", "stop",
)  # fmt: skip
FORMS = ("response_format", "structured_outputs")
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
NO, YES = Support(False), Support(True)


def supported_parameters(services: Services) -> list[str]:
    """Returns OpenRouter's names of the fields of a chat. Those for sampling and forms are fields of
    completions, too."""
    names = [*SAMPLING]
    if _has_forms(services):
        names += FORMS
    if _has_tools(services):
        names += TOOLS
    if _thinks(services):
        names.append("include_reasoning")
    if _has_efforts(services):
        names.append("reasoning_effort")
    return names


def capabilities(services: Services) -> Capabilities:
    efforts, thinks = Support(_has_efforts(services)), Support(_thinks(services))
    return Capabilities(
        batch=NO,
        citations=NO,
        code_execution=NO,
        context_management=ContextCapability(supported=True, clear_thinking_20251015=YES),
        effort=EffortCapability(efforts.supported, efforts, efforts, efforts, efforts, efforts),
        image_input=NO,
        pdf_input=NO,
        server_tools=ServerTools(supported=False, code_execution=NO, web_search=NO),
        structured_outputs=Support(_has_forms(services)),
        thinking=ThinkingCapability(
            supported=thinks.supported,
            types=ThinkingTypes(adaptive=thinks, between_tools=NO, disabled=YES, enabled=thinks),
        ),
    )


def _has_forms(services: Services) -> bool:
    info = services.engine.info
    return not services.output_format.is_harmony and (info is None or info.synthetic_acceptance is None)


def _has_tools(services: Services) -> bool:
    return services.chat is not None and services.output_format.has_calls


def _thinks(services: Services) -> bool:
    return services.chat is not None and services.output_format.thinking_end is not None


def _has_efforts(services: Services) -> bool:
    return "reasoning_effort" in effort_variables("high", services.template_source)
