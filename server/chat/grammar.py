"""Grammars for the text of an answer to a chat: calls of its tools, a form of text, or either of them."""

from __future__ import annotations

import msgspec

from headway.engine import EngineInfo, Grammar, RelaxedThinking, ThinkingBudget
from headway.server.base.errors import ApiError
from headway.server.chat.output import callable_tools, is_call_required, is_single_call
from headway.server.formats import OutputFormat
from headway.server.generation.choice_output import OutputOptions
from headway.server.grammar.frames import TextForm, ToolCalls
from headway.server.grammar.grammars import check_conflicts
from headway.server.grammar.text_forms import text_form
from headway.server.protocol.chat import ChatRequest
from headway.server.requests.services import Services, engine_info
from headway.server.text.tokenizer import Tokenizer


async def chat_grammar(
    body: ChatRequest, output: OutputOptions | None, services: Services, ignored: list[str]
) -> Grammar | None:
    """Returns the grammar of the text after the reasoning; None if any text is allowed. Raises ApiError for
    what cannot be enforced.

    Calls of all tools are enforced if a call is required or any tool is strict. ignored: receives the paths
    of schema keywords that are not enforced.
    """
    form = text_form(body)
    has_tools = output is not None and output.tools is not None
    is_enforced = has_tools and (form is not None or is_call_required(body) or _has_strict_tool(body))
    if not is_enforced and form is None:
        return None
    param = "tools" if form is None or is_call_required(body) else form.param
    check_conflicts(body, param, engine_info(services))
    if form is not None:
        _check_form(form, services.output_format, with_tools=is_enforced and not is_call_required(body))
        source = await services.grammars.compile(form, ignored)
    if is_enforced and output is not None:
        value = _calls(body, None if is_call_required(body) else form, output.format)
        source = await services.grammars.compile(TextForm("tools", value, param), ignored)
    if output is None or services.output_format.is_harmony:
        return Grammar(source)
    return Grammar(source, output.thinking)


def _has_strict_tool(body: ChatRequest) -> bool:
    return any("strict" in tool["function"] for tool in callable_tools(body))


def _check_form(form: TextForm, output_format: OutputFormat, *, with_tools: bool) -> None:
    """Refuses forms that cannot be combined with the rest of the answer."""
    if output_format.is_harmony:
        message = f"{form.param} is not served with this model, whose answers are messages with headers (harmony); leave it out"
        raise ApiError(message, param=form.param, code="unsupported_parameter")
    if with_tools and form.kind == "lark":
        message = f"{form.param} is not served beside tools that may be called; send tool_choice 'none', or a schema"
        raise ApiError(message, param=form.param, code="unsupported_parameter")


def _calls(body: ChatRequest, text: TextForm | None, output_format: OutputFormat) -> str:
    """Returns the value of a TextForm of kind tools. text: the form of a text that may take the place of
    calls."""
    places = {tool.function.name: i for i, tool in enumerate(body.tools or ()) if tool.function is not None}
    tools = [(places[tool["function"]["name"]], tool) for tool in callable_tools(body)]
    calls = ToolCalls(
        output_format.name,
        tools,
        required=is_call_required(body),
        parallel=not is_single_call(body),
        text=text,
    )
    return msgspec.json.encode(calls).decode()


def thinking_budget(
    body: ChatRequest, output: OutputOptions | None, output_format: OutputFormat, tokenizer: Tokenizer
) -> ThinkingBudget | None:
    """Returns the token at which the reasoning is closed; None for a request without a budget, and for a
    prompt that has closed its reasoning.

    Reasoning that the model opens by a token of its own begins after that token, if it opens any. Raises
    ApiError if no single token closes it.
    """
    num_tokens = body.thinking_budget_tokens
    if num_tokens is None or num_tokens < 0:
        return None
    end = output_format.thinking_end
    end_id = None if end is None or output_format.is_harmony else tokenizer.token_id(end)
    if end_id is None:
        raise ApiError(
            f"thinking_budget_tokens is {num_tokens}, it must be left out or -1: this model has no reasoning that one token closes",
            param="thinking_budget_tokens",
            code="unsupported_parameter",
        )
    if output is None or output.thinking is None:
        return None
    if output.thinking.is_open:
        return ThinkingBudget(num_tokens, end_id)
    return ThinkingBudget(num_tokens + 1, end_id, output.thinking.start_id)


def relaxed_thinking(
    body: ChatRequest, output: OutputOptions | None, info: EngineInfo
) -> RelaxedThinking | None:
    """Returns where the reasoning may be LOSSY; None on a server that is exact, for a request that wants
    to be exact, and if no token of its own closes the reasoning."""
    is_exact = info.relaxed_thinking is None or (
        body.speculation is not None and bool(body.speculation.exact)
    )
    thinking = None if output is None or is_exact else output.thinking
    if (
        thinking is None
        or len(thinking.end_ids) != 1
        or not (thinking.is_open or thinking.start_id is not None)
    ):
        return None
    return RelaxedThinking(thinking.end_ids[0], None if thinking.is_open else thinking.start_id)
