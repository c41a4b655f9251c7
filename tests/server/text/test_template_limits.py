"""Conversations that a chat template does not take as they are, folded into what it takes, from all three
APIs alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from headway_testing import chat_templates, tiny_tokenizers
from headway_testing.chat_templates import CODER, GEMMA, GEMMA3, LLAMA, MISTRAL, NEMO, QWEN, QWEN_STRICT
from headway_testing.fake_chat import FirstContent
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.in_process_chat import InProcessChat

from headway.server.app import create_app
from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.text.template_limits import KnownLimits, TemplateLimits, folded, probed
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

Message = dict[str, Any]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def calling(*calls: tuple[str, str, str], text: str = "") -> Message:
    """calls: (id, name, arguments)"""
    told = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "content": text, "tool_calls": told}


def result(call_id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


ASKED, ANSWERED, MORE = said("user", "q1"), said("assistant", "a1"), said("user", "q2")
FIRST, LATE = said("system", "s1"), said("system", "s2")
TWO_CALLS = calling(("c1", "f", '{"a": 1}'), ("c2", "g", "{}"), text="both")
RESULTS = (result("c2", "r2"), result("c1", "r1"))
# (template, the conversation, what the template is given: role, text, names of calls)
CASES: dict[str, tuple[str, list[Message], list[tuple[str, str, str]]]] = {
    "late-system": (QWEN_STRICT, [FIRST, ASKED, ANSWERED, LATE, MORE],
        [("system", "s1", ""), ("user", "q1", ""), ("assistant", "a1", ""), ("user", "s2\nq2", "")]),
    "system-behind-a-question": (QWEN_STRICT, [ASKED, LATE], [("user", "q1\ns2", "")]),
    "system-behind-a-result": (QWEN_STRICT, [ASKED, calling(("c1", "f", "{}")), result("c1", "r1"), LATE],
        [("user", "q1", ""), ("assistant", "", "f"), ("tool", "r1\ns2", "")]),
    "late-system-that-is-dropped": (MISTRAL, [FIRST, ASKED, ANSWERED, LATE, MORE],
        [("system", "s1", ""), ("user", "q1", ""), ("assistant", "a1", ""), ("user", "s2\nq2", "")]),
    "late-system-that-is-taken": (QWEN, [FIRST, ASKED, ANSWERED, LATE, MORE],
        [("system", "s1", ""), ("user", "q1", ""), ("assistant", "a1", ""), ("system", "s2", ""), ("user", "q2", "")]),
    "no-system": (GEMMA, [FIRST, ASKED, ANSWERED, MORE], [("user", "s1\nq1", ""), ("assistant", "a1", ""), ("user", "q2", "")]),
    "systems-of-gemma-3": (GEMMA3, [FIRST, LATE, ASKED, MORE, ANSWERED, MORE],
        [("system", "s1\ns2", ""), ("user", "q1\nq2", ""), ("assistant", "a1", ""), ("user", "q2", "")]),
    "question-behind-results": (NEMO, [ASKED, calling(("c1", "f", "{}")), result("c1", "r1"), MORE, ANSWERED, said("user", "q3")],
        [("user", "q1", ""), ("assistant", "", "f"), ("tool", "r1\nq2", ""), ("assistant", "a1", ""), ("user", "q3", "")]),
    "question-behind-results-that-is-taken": (QWEN, [ASKED, calling(("c1", "f", "{}")), result("c1", "r1"), MORE],
        [("user", "q1", ""), ("assistant", "", "f"), ("tool", "r1", ""), ("user", "q2", "")]),
    "calls-one-by-one": (LLAMA, [ASKED, TWO_CALLS, *RESULTS, MORE],
        [("user", "q1", ""), ("assistant", "both", "f"), ("tool", "r1", ""), ("assistant", "", "g"), ("tool", "r2", ""), ("user", "q2", "")]),
    "calls-that-are-taken": (QWEN, [ASKED, TWO_CALLS, *RESULTS, MORE],
        [("user", "q1", ""), ("assistant", "both", "f g"), ("tool", "r2", ""), ("tool", "r1", ""), ("user", "q2", "")]),
}  # fmt: skip


def as_chat(messages: list[Message]) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": messages}


def as_responses(messages: list[Message]) -> tuple[str, dict[str, Any]]:
    items = list[Message]()
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
            continue
        if message["content"]:
            items.append({"type": "message", "role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return "/v1/responses", {"input": items}


def as_messages(messages: list[Message]) -> tuple[str, dict[str, Any]]:
    turns = list[Message]()
    for message in messages:
        blocks: list[Message] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "tool":
            blocks = [
                {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            ]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": json.loads(function["arguments"]),
                }
            )
        turns.append({"role": "user" if message["role"] == "tool" else message["role"], "content": blocks})
    return "/v1/messages", {"messages": turns, "max_tokens": 2}


APIS = {"chat": as_chat, "responses": as_responses, "messages": as_messages}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("limits")
    return load_tokenizer(tiny_tokenizers.save(folder, chat_templates.byte_level()))


@pytest.fixture
def asked(engine: FakeEngine, tokenizer: Tokenizer) -> Callable[..., Any]:
    async def asked(template: str, path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[Message]]:
        """The answer, and what the template was given."""
        chat = InProcessChat(template, VARIABLES)
        services = fake_services(engine, tokenizer, chat, template=template)
        transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
            answer = await client.post(path, json=body)
        return answer, chat.jobs[-1].conversation.messages

    return asked


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", CASES)
async def test_a_conversation_is_folded_into_what_the_template_takes(
    asked: Callable[..., Any], name: str, api: str
) -> None:
    template, messages, expected = CASES[name]
    path, body = APIS[api](messages)
    answer, given = await asked(template, path, body)
    assert answer.status_code == 200, answer.text
    told = [
        (m["role"], m["content"], " ".join(call["function"]["name"] for call in m.get("tool_calls", ())))
        for m in given
    ]
    assert told == expected
    if api == "messages":
        counted, _ = await asked(template, f"{path}/count_tokens", {"messages": body["messages"]})
        assert counted.status_code == 200, counted.text


@pytest.mark.parametrize("arguments", ["null", " ", "", "[]", "5", '"text"', '{"a": '])
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("template", [CODER, QWEN_STRICT, QWEN], ids=["coder", "qwen-strict", "qwen"])
async def test_arguments_that_are_no_object_are_what_the_template_takes(
    asked: Callable[..., Any], template: str, api: str, arguments: str
) -> None:
    path, body = APIS[api]([ASKED, calling(("c1", "f", arguments)), result("c1", "r1")])
    answer, given = await asked(template, path, body)
    assert answer.status_code == 200, answer.text
    is_empty = not arguments.strip() or arguments == "null"
    kept = given[1]["tool_calls"][0]["function"]["arguments"]
    assert kept == ({} if is_empty or template != QWEN else arguments)
    place = "messages[1].tool_calls[0].function.arguments" if api == "chat" else "input[1].arguments"
    assert answer.headers.get("x-headway-ignored") == (None if is_empty or template == QWEN else place)


async def test_turns_that_a_template_wants_in_turn_are_put_together(asked: Callable[..., Any]) -> None:
    messages = [said("user", "q0"), ASKED, ANSWERED, said("assistant", "a2"), MORE]
    _, given = await asked(GEMMA, *as_chat(messages))
    assert given == [said("user", "q0\nq1"), said("assistant", "a1\na2"), MORE]
    _, given = await asked(QWEN, *as_chat(messages))
    assert given == messages


async def test_errors_name_the_message_of_the_request(asked: Callable[..., Any]) -> None:
    path, body = as_chat([FIRST, ASKED, ANSWERED, MORE])
    answer, _ = await asked(GEMMA, path, {**body, "continue_final_message": True})
    assert answer.status_code == 400
    assert "messages[3].role is 'user'" in answer.json()["error"]["message"]


LIMITS = {
    "qwen": (QWEN, TemplateLimits()),
    "qwen-strict": (QWEN_STRICT, TemplateLimits(several_systems=False, late_system=False, any_arguments=False)),
    "coder": (CODER, TemplateLimits(any_arguments=False)),
    "llama": (LLAMA, TemplateLimits(several_calls=False)),
    "mistral": (MISTRAL, TemplateLimits(several_systems=False, late_system=False)),
    "nemo": (NEMO, TemplateLimits(repeated_roles=False, users_behind_results=False)),
    "gemma": (GEMMA, TemplateLimits(system=False, several_systems=False, late_system=False, repeated_roles=False)),
    "gemma-3": (GEMMA3, TemplateLimits(several_systems=False, late_system=False, repeated_roles=False)),
    "always-refuses": ("{{ raise_exception('no') }}", TemplateLimits()),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
async def test_small_conversations_show_what_a_template_takes(name: str) -> None:
    template, expected = LIMITS[name]
    for has_tools in (False, True):
        assert await probed(InProcessChat(template, VARIABLES).render, has_tools=has_tools) == expected


async def test_of_a_renderer_that_shows_nothing_no_limit_is_known() -> None:
    assert await probed(FirstContent().render, has_tools=False) == TemplateLimits()


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_long_history_is_folded_in_little_time(role: str) -> None:
    limits = TemplateLimits(several_systems=False, late_system=False, repeated_roles=False)
    conversation = Conversation([said(role, "x" * 1900) for _ in range(4096)])
    start = time.process_time()
    fold = folded(conversation, limits)
    assert time.process_time() - start < 1.0  # 13 s where each message is joined to all before it
    assert [message["content"] for message in fold.conversation.messages] == ["\n".join(["x" * 1900] * 4096)]


async def test_a_start_without_a_renderer_leaves_the_limits_to_the_first_request() -> None:
    limits, chat = KnownLimits(), InProcessChat(QWEN, VARIABLES)

    async def refuse(conversation: Conversation) -> str:
        raise ApiError("no process", status=503, code="chat_template_unavailable")

    await limits.warm_up(refuse)
    assert not limits.by_tools
    await limits.warm_up(chat.render)
    assert limits.by_tools[False] == await probed(chat.render, has_tools=False)
