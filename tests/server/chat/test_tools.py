"""Tools in the body of a chat: what the chat template is given of them, and what is refused by which path."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.base.conversation import Conversation
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "default": None}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": WEATHER}
TIME = {"type": "function", "function": {"name": "time"}}


def allowed(tools: list[dict[str, Any]], mode: str = "auto") -> dict[str, Any]:
    """A choice among some tools, as OpenAI's chats have it."""
    named = [{"type": "function", "function": {"name": tool["function"]["name"]}} for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.fixture
def recorded() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
def template() -> str:
    return "{{ tools }}<tool_call>{{ enable_thinking }}"


@pytest.fixture
def services(
    engine: FakeEngine, tokenizer: Tokenizer, recorded: RecordingChat, template: str, grammars: Grammars
) -> Services:
    return fake_services(engine, tokenizer, recorded, template=template, grammars=grammars)


async def rendered(client: httpx.AsyncClient, recorded: RecordingChat, **body: Any) -> Conversation:
    response = await client.post(URL, json={"messages": [HELLO], "max_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return recorded.seen[-1]


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": [HELLO], **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("mode", ["auto", "required", None])
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
async def test_a_choice_among_some_tools_is_a_chat_with_those_alone(
    client: httpx.AsyncClient, recorded: RecordingChat, engine: FakeEngine, mode: str | None, is_flat: bool
) -> None:
    choice = allowed([TIME], mode or "auto")
    if mode is None:
        del choice["allowed_tools"]["mode"]
    if is_flat:
        tools = [
            {"type": "function", "name": tool["function"]["name"]}
            for tool in choice["allowed_tools"]["tools"]
        ]
        choice = {"type": "allowed_tools", **choice["allowed_tools"], "tools": tools}
    conversation = await rendered(client, recorded, tools=[TOOL, TIME], tool_choice=choice)
    assert conversation.tools == [TIME]
    grammars = [submit.grammar for submit in engine.submitted]
    await rendered(client, recorded, tools=[TIME], tool_choice=mode or "auto")
    assert [submit.grammar for submit in engine.submitted] == grammars * 2
    assert (grammars[0] is not None) == (mode == "required")


async def test_what_is_left_out_of_an_allowed_tool_is_told_by_its_place_in_the_request(
    client: httpx.AsyncClient,
) -> None:
    odd = {**SCHEMA, "properties": {"city": {"type": "string", "format": "postcode"}}}
    other = {"type": "function", "function": {"name": "other", "parameters": odd}}
    body = {
        "messages": [HELLO],
        "max_tokens": 2,
        "tools": [TOOL, other],
        "tool_choice": allowed([other], "required"),
    }
    response = await client.post(URL, json=body)
    assert response.headers["x-headway-ignored"] == "tools[1].function.parameters.properties.city.format"


async def test_a_function_may_be_named_beside_the_type(
    client: httpx.AsyncClient, recorded: RecordingChat, engine: FakeEngine
) -> None:
    for choice in ({"type": "function", "name": "time"}, {"type": "function", "function": {"name": "time"}}):
        await rendered(client, recorded, tools=[TOOL, TIME], tool_choice=choice)
    first, second = (submit.grammar for submit in engine.submitted)
    assert first is not None
    assert first == second


@pytest.mark.parametrize(
    "choice", [None, "auto", "none", "required", {"type": "function", "function": {"name": "time"}}]
)
async def test_the_template_sees_all_tools_whatever_the_choice(
    client: httpx.AsyncClient, recorded: RecordingChat, choice: Any
) -> None:
    strict = {
        "type": "function",
        "function": WEATHER | {"strict": True},
        "cache_control": {"type": "ephemeral"},
    }
    conversation = await rendered(client, recorded, tools=[strict, TIME], tool_choice=choice)
    assert conversation.tools == [TOOL, TIME]
    assert list(conversation.tools[0]["function"]) == ["name", "description", "parameters"]


async def test_no_tools_are_none_for_the_template(client: httpx.AsyncClient, recorded: RecordingChat) -> None:
    for tools in (None, []):
        assert (await rendered(client, recorded, tools=tools, tool_choice="auto")).tools is None


CALL = {
    "id": "call_1",
    "type": "function",
    "index": 0,
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def as_template(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    return [{**more, "type": "function", "function": {"name": "weather", "arguments": arguments}}]


HISTORY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"role": "assistant", "content": None, "tool_calls": [CALL]},
     {"content": "", "tool_calls": as_template({"city": "Paris"}, id="call_1")}),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": ""}}]},
     {"content": "", "tool_calls": as_template({})}),
    ({"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "weather", "arguments": {"a": None}}}]},
     {"content": "x", "tool_calls": as_template({"a": None})}),
    ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": '}}]},
     {"content": "", "tool_calls": as_template('{"city": ')}),
    ({"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": "[1]"}}]},
     {"content": "", "tool_calls": as_template("[1]")}),
    ({"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
     {"content": "", "tool_calls": as_template({})}),
    ({"role": "assistant", "content": None, "tool_calls": [], "function_call": None, "annotations": None}, {"content": ""}),
    (RESULT, {"content": "rain", "tool_call_id": "call_1"}),
    ({"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "a\nb"}),
    ({"role": "function", "name": "weather", "content": None}, {"role": "tool", "content": "", "name": "weather"}),
    ({"role": "assistant", "content": "x", "reasoning_content": "hm"},
     {"content": "x", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}),
    ({"role": "assistant", "content": "x", "reasoning": "hm", "reasoning_content": None},
     {"content": "x", "reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}),
    ({"role": "assistant", "content": "x", "reasoning": {"id": 1}}, {"content": "x"}),
    ({"role": "user", "content": "x", "reasoning_content": "hm"}, {"content": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "seen"), HISTORY)
async def test_calls_and_results_of_a_history_reach_the_template(
    client: httpx.AsyncClient, recorded: RecordingChat, message: dict[str, Any], seen: dict[str, Any]
) -> None:
    conversation = await rendered(client, recorded, messages=[HELLO, message])
    assert conversation.messages[1] == {"role": message["role"]} | seen


async def test_variables_documents_and_open_ends_reach_the_template(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    document = {"title": "a", "text": "b"}
    seen = await rendered(
        client, recorded, documents=[document], chat_template_kwargs={"a": [1], "enable_thinking": False}
    )
    assert (seen.documents, seen.template_variables) == ([document], {"a": [1], "enable_thinking": False})
    assert (seen.adds_generation_prompt, seen.continues_final_message) == (True, False)
    assert not (await rendered(client, recorded, add_generation_prompt=False)).adds_generation_prompt
    messages = [HELLO, {"role": "assistant", "content": "Well"}]
    seen = await rendered(client, recorded, messages=messages, continue_final_message=True)
    assert (seen.adds_generation_prompt, seen.continues_final_message) == (False, True)
    both = {"add_generation_prompt": True, "continue_final_message": True}
    assert (await refusal(client, messages=messages, **both))["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "effort", "variables"),
    [
        ("{{ reasoning_effort }}{{ enable_thinking }}", "high", {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", "none", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "low", {"enable_thinking": True}),
        (
            "{% if not thinking is defined %}{% endif %}{% if thinking is not defined %}",
            "high",
            {"thinking": True},
        ),
        ("{{ message.thinking }}", "none", {}),
        ("{{ enable_thinking }}", None, {}),
    ],
)
async def test_a_reasoning_effort_reaches_the_template_by_the_name_that_it_reads(
    client: httpx.AsyncClient, recorded: RecordingChat, effort: str | None, variables: dict[str, Any]
) -> None:
    assert (await rendered(client, recorded, reasoning_effort=effort)).template_variables == variables


async def test_an_effort_that_the_body_contradicts_is_refused(client: httpx.AsyncClient) -> None:
    error = await refusal(client, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert error["param"] == "reasoning_effort"
    assert "chat_template_kwargs.enable_thinking" in error["message"]


def named(name: str, **more: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **more}}]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{}]}, "tools[0].type", "is missing"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function", "is missing"),
    ({"tools": named("")}, "tools[0].function.name", "''"), ({"tools": named("a b")}, "tools[0].function.name", "'a b'"),
    ({"tools": named("a" * 129)}, "tools[0].function.name", "1 to 128"), ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "'custom'"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
    ({"tools": named("f", parameters="{}")}, "tools[0].function.parameters", "must be an object"),
    ({"tools": named("f", strict="yes")}, "tools[0].function.strict", "true or false"),
    ({"tools": named("f", paramters={})}, "tools[0].function.paramters", "did you mean tools[0].function.parameters?"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools[0].function", "tools[0].function is missing"),
    ({"tools": {}}, "tools", "must be an array"), ({"tools": named("f") * 513}, "tools", "at most 512"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "'required'"), ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [TOOL], "tool_choice": 1}, "tool_choice", "must be a string or an object"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice.function.name", "(weather)"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.type", "'function' or 'allowed_tools'"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.allowed_tools.tools", "is missing"),
    ({"tools": [TOOL], "tool_choice": allowed([TIME])}, "tool_choice.allowed_tools.tools[0].function.name", "one of the tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}}, "tool_choice.tools[0].name", "'x'"),
    ({"tools": [TOOL], "tool_choice": allowed([TOOL], mode="any")}, "tool_choice.allowed_tools.mode", "'auto' or 'required'"),
    ({"tools": [TOOL], "tool_choice": allowed([], mode="required")}, "tool_choice", "no tools"),
    ({"tools": [TIME, {"type": "function", "function": {**WEATHER, "name": "a b"}}], "tool_choice": allowed([{"function": {"name": "a b"}}])},
     "tools[1].function.name", "letters"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"functions": [WEATHER]}, "functions", "`tools`"), ({"function_call": {"name": "weather"}}, "function_call", "`tool_choice`"),
    ({"reasoning_effort": "much"}, "reasoning_effort", "one of none"), ({"thinking_budget_tokens": -2}, "thinking_budget_tokens", "-1 to"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"), ({"documents": ["x"]}, "documents[0]", "must be an object"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "messages"),
    ({"include_reasoning": 1}, "include_reasoning", "true or false"),
    ({"messages": [HELLO, {"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[1].tool_calls", "an assistant's"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]},
     "messages[1].tool_calls[0].function.name", "is missing"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
     "messages[1].tool_calls[0].function.arguments", "must be"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]}, "messages[1].tool_calls[0].type", "'custom'"),
    ({"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL], "function_call": {"name": "f"}}]}, "messages[1].function_call", "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"), WRONG, ids=[f"{i}-{p}" for i, (_, p, _) in enumerate(WRONG)]
)
async def test_what_is_wrong_with_tools_is_told_by_its_path(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(client, **body)
    assert error["param"] == param, error
    assert param.split(".")[-1] in error["message"]
    assert words in error["message"]
    assert not engine.submitted


class TestAFormatWithoutCalls:
    @pytest.fixture
    def template(self) -> str:
        return "{{ messages }}"

    async def test_tools_that_may_be_called_are_refused(
        self, client: httpx.AsyncClient, recorded: RecordingChat
    ) -> None:
        error = await refusal(client, tools=[TOOL])
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "--tool-format" in error["message"]
        assert (await rendered(client, recorded, tools=[TOOL], tool_choice="none")).tools == [TOOL]


async def test_a_conversation_that_was_begun_elsewhere_goes_on(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    """As openai-python's `model_dump` writes it: every field, null or not."""
    answer = {
        "content": None, "refusal": None, "role": "assistant", "annotations": None, "audio": None, "function_call": None,
        "tool_calls": [{"id": "call_1", "function": {"arguments": json.dumps({"city": "Oslo"}), "name": "weather", "parsed_arguments": {}},
                        "type": "function", "extra_content": {"google": {}}}],
    }  # fmt: skip
    seen = await rendered(client, recorded, messages=[HELLO, answer, RESULT])
    assert seen.messages[1]["tool_calls"] == as_template({"city": "Oslo"}, id="call_1")
