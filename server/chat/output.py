"""Decides how the answer to a chat is split into parts, by the request and the format of the model's
output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.engine import Thinking
from headway.server.base.errors import ApiError
from headway.server.formats import OutputFormat, find_format
from headway.server.generation.choice_output import OutputOptions
from headway.server.protocol.chat import ChatRequest
from headway.server.protocol.tools import NamedChoice, grammar_tools
from headway.server.text.control_text import ChatPrompt
from headway.server.text.tokenizer import Tokenizer


def callable_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """Returns the tools that the answer may call, in OpenAI's form."""
    choice = body.tool_choice
    if choice == "none":
        return []
    tools = grammar_tools(body.tools)
    if isinstance(choice, NamedChoice) and choice.function is not None:
        name = choice.function.name
        return [tool for tool in tools if tool["function"]["name"] == name]
    return tools


def is_call_required(body: ChatRequest) -> bool:
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedChoice)


def is_single_call(body: ChatRequest) -> bool:
    """Returns whether the answer has at most one call, as after the choice of one function by its name."""
    return body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedChoice)


def with_calls(output_format: OutputFormat) -> OutputFormat:
    """Returns the format with calls. A model without any writes the Hermes format, as a grammar makes it
    do."""
    if output_format.has_calls:
        return output_format
    enforced = find_format(None, name="hermes")
    return replace(output_format, name=enforced.name, calls=enforced.calls)


def output_options(
    body: ChatRequest,
    chat: ChatPrompt,
    output_format: OutputFormat,
    tokenizer: Tokenizer,
    *,
    ignores_tools: bool = False,
) -> OutputOptions | None:
    """Returns how the choices' texts are split into parts; None if a text is a single part. ignores_tools:
    tools that need not be called are ignored for a model without a format for calls, instead of refused."""
    tools = callable_tools(body)
    if is_call_required(body):
        output_format = with_calls(output_format)
    elif tools and not output_format.has_calls:
        if not ignores_tools:
            raise _no_calls()
        tools = []
    if not tools and output_format.thinking_end is None:
        return None
    continues = bool(body.continue_final_message)
    prompt = _written_prompt(chat, continues=continues)
    thinking = thinking_of(output_format, prompt, tokenizer, continues=continues)
    return OutputOptions(
        format=output_format,
        # An answer that is continued within its reasoning is read as one that begins there.
        prompt=output_format.thinking_start or "" if thinking and thinking.is_open else prompt,
        tools=tools or None,
        is_single_call=bool(tools) and is_single_call(body),
        thinking=thinking,
    )


def _no_calls() -> ApiError:
    return ApiError(
        "tools are given, and the server does not know in what form this model calls them: its chat template is of no known "
        "kind; send tool_choice 'none', or 'required' for calls by a grammar, or start the server with --tool-format",
        param="tools",
        code="unsupported_parameter",
    )


def _written_prompt(chat: ChatPrompt, *, continues: bool) -> str:
    """Returns the prompt without the structural tokens that clients spelled out, which delimit nothing. In
    an answer that is to be continued they do."""
    if continues:
        return chat.spelled_out()
    return "".join(text for text, is_spelled in chat.pieces() if not is_spelled)


def thinking_of(
    output_format: OutputFormat, prompt: str, tokenizer: Tokenizer, *, continues: bool = False
) -> Thinking | None:
    """Returns where the reasoning ends that the prompt or the model begins; None for a format without
    reasoning, and for a prompt that has ended its reasoning."""
    start, end = output_format.thinking_start, output_format.thinking_end
    if end is None or prompt.rstrip().endswith(end):
        return None
    is_open = start is not None and (
        prompt.rstrip().endswith(start) or (continues and prompt.rfind(start) > prompt.rfind(end))
    )
    start_id = None if start is None else tokenizer.token_id(start)
    return Thinking(end_ids=ids_of(end, tokenizer), is_open=is_open, start_id=start_id)


def ids_of(delimiter: str, tokenizer: Tokenizer) -> list[int]:
    token_id = tokenizer.token_id(delimiter)
    return tokenizer.encode_plain(delimiter) if token_id is None else [token_id]
