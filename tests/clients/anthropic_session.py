"""Anthropic's client as its users have it; prints what came as JSON. Every event and answer must be of the
client's own types.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import anthropic
from anthropic import beta_tool
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

MODEL = "demo-tools"
TURN = "\n=====\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for Paris.\n</think>\n\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}
ALARM = {
    "name": "set_alarm",
    "input_schema": {
        "type": "object",
        "properties": {"hour": {"enum": [1, 2]}},
        "required": ["hour"],
        "additionalProperties": False,
    },
}
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Item(BaseModel, extra="forbid"):
    """Something of which every text has a bound, so that it ends. The client takes lengths and ranges out of
    schemas."""

    color: Literal["red", "green", "blue"]
    shade: Literal["dark", "light"]


def user(content: Any) -> Any:
    return {"role": "user", "content": content}


def ask(client: anthropic.Anthropic, script: Any, **fields: Any) -> dict[str, Any]:
    """The answer whole, and the same put together of a stream by the client, which must agree."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [user(script)],
        "tools": [TOOL],
        "max_tokens": 400,
    } | fields
    whole = client.messages.create(**body)
    Message.model_validate(whole.to_dict(), strict=True)
    with client.messages.with_streaming_response.create(stream=True, **body) as raw:
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line.startswith("data: ")]
    events = [EVENTS.validate_json(line, strict=True) for line in lines]
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in final.content if block.type == "text")
    assert told(final) == told(whole), (told(final), told(whole))
    return told(whole) | {"events": [event.type for event in events]}


def told(message: Message) -> dict[str, Any]:
    blocks = [
        {name: value for name, value in block.to_dict().items() if name != "id"} for block in message.content
    ]
    usage = message.usage
    return {
        "content": blocks, "stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence,
        "prompt": usage.input_tokens + (usage.cache_read_input_tokens or 0), "output_tokens": usage.output_tokens,
        "thinking_tokens": usage.output_tokens_details.thinking_tokens if usage.output_tokens_details else None,
    }  # fmt: skip


def conversation(client: anthropic.Anthropic) -> dict[str, Any]:
    """Answers go back as the client has them, with results of their calls."""
    messages = [user(f"{THOUGHT}I look.\n{CALL}{TURN}It rains.")]
    fields: dict[str, Any] = {
        "model": MODEL, "tools": [TOOL], "max_tokens": 400, "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    first = client.messages.create(messages=messages, **fields)
    messages.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}], "is_error": False}
        for block in first.content if block.type == "tool_use"
    ]  # fmt: skip
    messages.append(user(results))
    last = client.messages.create(messages=messages, **fields)
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
    MessageTokensCount.model_validate(counted.to_dict(), strict=True)
    return {"first": told(first), "last": told(last), "counted": counted.input_tokens}


def tool_runner(client: anthropic.Anthropic) -> list[Any]:
    called: list[tuple[str, int]] = []

    @beta_tool
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        called.append((city, days))
        return "rain"

    script = user(f"{CALL}{TURN}It rains.")
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=400, tools=[get_weather], messages=[script]
    )
    last = runner.until_done()
    return [called, [block.to_dict() for block in last.content]]


def claude_code(client: anthropic.Anthropic) -> dict[str, Any]:
    """The shape of a request of Claude Code's, as its users report it."""
    body: dict[str, Any] = {
        "model": MODEL, "max_tokens": 32000, "metadata": {"user_id": "user_0_account__session_0"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            user([{"type": "text", "text": f"{CALL}{TURN}It rains.", "cache_control": {"type": "ephemeral"}}]),
            {"role": "system", "content": "Available agent types: none"},
        ],
        "tools": [TOOL | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "mid-conversation-system-2026-04-07"],
    }  # fmt: skip
    with client.beta.messages.stream(**body) as stream:
        message = stream.get_final_message()
    del body["max_tokens"], body["metadata"]
    return {
        "stop_reason": message.stop_reason, "input": [b.input for b in message.content if b.type == "tool_use"],
        "counted": client.beta.messages.count_tokens(**body).input_tokens,
        "prompt": message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
    }  # fmt: skip


def errors(client: anthropic.Anthropic) -> dict[str, Any]:
    wrong: dict[str, dict[str, Any]] = {
        "model": {"model": "claude-opus-4-8"},
        "server-tool": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "image": {
            "messages": [user([{"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}])]
        },
        "long": {"messages": [user("word " * 40_000)]},
    }
    found = {}
    for name, fields in wrong.items():
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": [user("x")]} | fields)
        except anthropic.APIStatusError as error:
            ErrorResponse.model_validate(error.body, strict=True)
            body: Any = error.body
            found[name] = [
                type(error).__name__,
                error.type,
                error.error_code,
                body["error"]["message"][:80],
                bool(error.request_id),
            ]
    return found


def real(client: anthropic.Anthropic) -> dict[str, Any]:
    """What a request enforces holds, though the model means nothing of what it says."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [user("import os")]}
    parsed = client.messages.parse(output_format=Item, **fields).parsed_output
    tools = [TOOL, ALARM]
    called = client.messages.create(
        tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}, **fields
    )
    named = client.messages.create(tools=tools, tool_choice={"type": "tool", "name": "set_alarm"}, **fields)
    return {"parsed": isinstance(parsed, Item), "any": told(called), "named": told(named)}


def models(client: anthropic.Anthropic) -> dict[str, Any]:
    (listed,) = client.models.list()
    one = client.models.retrieve(MODEL)
    ModelInfo.model_validate_json(listed.to_json())
    assert listed.capabilities is not None
    return {
        "same": listed == one, "id": listed.id, "thinking": listed.capabilities.thinking.supported,
        "max_input_tokens": listed.max_input_tokens, "extra": sorted(ModelInfo.model_fields.keys() - listed.model_fields_set),
    }  # fmt: skip


def main(url: str, scripted_url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    scripted = anthropic.Anthropic(base_url=scripted_url, api_key="none", max_retries=0, timeout=120)
    answers = {
        "text": ask(scripted, "Hello there."),
        "calls": ask(scripted, f"I look.\n{CALL}\n{OTHER_CALL}"),
        "one-call": ask(scripted, f"{CALL}\n{OTHER_CALL}", tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
        "thinking": ask(scripted, f"{THOUGHT}Paris.", thinking={"type": "adaptive"}),
        "omitted": ask(scripted, f"{THOUGHT}Paris.", thinking={"type": "adaptive", "display": "omitted"}),
        "stop": ask(scripted, "one two three", stop_sequences=["two"]),
        "cut": ask(scripted, "one two three", max_tokens=2),
    }  # fmt: skip
    print(json.dumps({
        "answers": answers, "conversation": conversation(scripted), "runner": tool_runner(scripted), "claude_code": claude_code(scripted),
        "errors": errors(scripted), "real": real(client), "models": models(scripted),
    }))  # fmt: skip


main(*sys.argv[1:])
