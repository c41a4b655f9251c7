"""Tools of /v1/responses of every type: what the template is given of them, how their calls come back, what a
history has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from headway_testing.fake_chat import RecordingChat
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.response_stream import events_of, put_together, told
from headway_testing.tiny_tokenizers import save_with_delimiters
from openai.types.responses import Response

from headway.server.base.conversation import Conversation
from headway.server.base.field_names import FieldNames
from headway.server.protocol.responses_api import ResponsesRequest, ResponseTool
from headway.server.requests.services import Services
from headway.server.responses_api.tools import tools_of
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

URL = "/v1/responses"
TEMPLATE = "{{ tools }}<tool_call></think>"
IGNORED = "x-headway-ignored"


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **more}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "d", "tools": list(tools)}


PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"+'},
}  # fmt: skip
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object"},
}
WEB = {"type": "web_search", "external_web_access": False}
TOOLS = [function("f"), namespace("mcp__demo", function("f"), {**PATCH, "name": "edit"}), PATCH, SEARCH, WEB]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_with_delimiters(tmp_path_factory.mktemp("marks"), "special"))


class AnswersAtOnce(RecordingChat):
    async def render(self, conversation: Conversation) -> str:
        await super().render(conversation)
        return "assistant:"


@pytest.fixture
def recorded() -> RecordingChat:
    return AnswersAtOnce()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, recorded: RecordingChat) -> Services:
    return fake_services(engine, tokenizer, recorded, template=TEMPLATE)


async def posted(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    response = await client.post(URL, json={"input": "hello", "max_output_tokens": 40, **body})
    assert response.status_code == 200, response.text
    return response


def offered(recorded: RecordingChat) -> dict[str, Any]:
    """The functions that the template was last given, by name."""
    return {tool["function"]["name"]: tool["function"] for tool in recorded.seen[-1].tools or []}


async def test_all_that_a_client_runs_is_a_function_of_the_template(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    response = await posted(client, tools=TOOLS)
    found = offered(recorded)
    assert list(found) == ["f", "mcp__demo__f", "mcp__demo__edit", "apply_patch", "tool_search"]
    text = found["apply_patch"]["parameters"]["properties"]["input"]
    assert text == {"type": "string", "description": 'A text of this lark grammar:\nstart: "x"+'}
    assert found["tool_search"]["description"] == "Finds tools."
    answer = response.json()
    Response.model_validate(answer, strict=True)
    assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace", "custom", "tool_search"]
    assert [tool["name"] for tool in answer["tools"][1]["tools"]] == ["f", "edit"]


@pytest.mark.parametrize(
    ("tools", "ignored"),
    [
        ([function("f"), WEB], "tools[1]"),
        ([{"type": "image_generation", "output_format": "png"}], "tools[0]"),
        ([{"type": "mcp", "server_label": "x", "server_url": "http://localhost"}, {"type": "local_shell"}], "tools[0], tools[1]"),
        ([{"type": "code_interpreter", "container": {"type": "auto"}}, {"type": "tool_search"}], "tools[0], tools[1]"),
        ([namespace("g", function("f"), WEB, SEARCH)], "tools[0].tools[1], tools[0].tools[2]"),
        ([{"type": "of_a_later_year", "name": "x"}], "tools[0]"),
        (TOOLS[:4], None),
    ],
)  # fmt: skip
async def test_tools_that_a_server_would_run_are_left_out_and_told(
    client: httpx.AsyncClient, recorded: RecordingChat, tools: list[Any], ignored: str | None
) -> None:
    for stream in (False, True):
        response = await posted(client, tools=tools, stream=stream)
        assert response.headers.get(IGNORED) == ignored
    assert all(name.endswith(("f", "edit", "apply_patch", "tool_search")) for name in offered(recorded))


def text_of(*calls: tuple[str, str]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


CALLS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "function": ("f", '{"a": 1}', ("function_call", "f", '{"a": 1}')),
    "in a namespace": ("mcp__demo__f", '{"a": 1}', ("function_call", "mcp__demo", "f", '{"a": 1}')),
    "custom": ("apply_patch", '{"input": "x\\n\u00e9"}', ("custom_tool_call", "apply_patch", "x\né")),
    "custom in a namespace": ("mcp__demo__edit", '{"input": ""}', ("custom_tool_call", "mcp__demo", "edit", "")),
    "custom by another argument": ("apply_patch", '{"patch": 1}', ("custom_tool_call", "apply_patch", '{"patch": 1}')),
    "search": ("tool_search", '{"query": "q"}', ("tool_search_call", {"query": "q"})),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "expected"), CALLS.values(), ids=CALLS)
async def test_a_call_comes_back_as_the_client_offered_its_tool(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    write: Callable[[str], list[int]],
    name: str,
    arguments: str,
    expected: tuple[str, ...],
) -> None:
    write(text_of((name, arguments)))
    answer = (await posted(client, tools=TOOLS, max_output_tokens=200)).json()
    Response.model_validate(answer, strict=True)
    assert told(answer["output"]) == [expected]
    engine.tokens_per_round = 2
    events = events_of((await posted(client, tools=TOOLS, max_output_tokens=200, stream=True)).text)
    assert told(events[-1]["response"]["output"]) == told(put_together(events)) == [expected]
    assert put_together(events) == events[-1]["response"]["output"]


@pytest.mark.parametrize("kind", ["function", "in a namespace", "custom", "custom in a namespace"])
async def test_a_call_goes_back_as_it_came(
    client: httpx.AsyncClient, recorded: RecordingChat, write: Callable[[str], list[int]], kind: str
) -> None:
    name, arguments, _ = CALLS[kind]
    write(text_of((name, arguments)))
    (call,) = (await posted(client, tools=TOOLS, max_output_tokens=200)).json()["output"]
    output = {
        "type": call["type"] + "_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "ok"}],
    }
    await posted(client, tools=TOOLS, input=[{"role": "user", "content": "hello"}, call, output])
    _, turn, result = recorded.seen[-1].messages
    assert turn["tool_calls"][0]["function"] == {"name": name, "arguments": json.loads(arguments)}
    assert (result["tool_call_id"], result["content"]) == (call["call_id"], "ok")


async def test_tools_that_a_search_finds_can_be_called(
    client: httpx.AsyncClient, recorded: RecordingChat, write: Callable[[str], list[int]]
) -> None:
    write(text_of(("tool_search", '{"query": "q"}')))
    (call,) = (await posted(client, tools=[SEARCH], max_output_tokens=200)).json()["output"]
    found = {
        "type": "tool_search_output",
        "call_id": call["call_id"],
        "execution": "client",
        "tools": [namespace("late", function("g"))],
    }
    history = [{"role": "user", "content": "hello"}, call, found]
    write(text_of(("late__g", "{}")))
    answer = (await posted(client, tools=[SEARCH], input=history, max_output_tokens=200)).json()
    assert told(answer["output"]) == [("function_call", "late", "g", "{}")]
    _, turn, result = recorded.seen[-1].messages
    assert turn["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"query": "q"}}
    assert "late__g" in result["content"]
    assert list(offered(recorded)) == ["tool_search", "late__g"]


async def test_tools_that_a_conversation_adds_are_offered_once(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    added = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [namespace("functions", PATCH, function("f")), WEB],
    }
    response = await posted(
        client, tools=[function("f")], input=[added, added, {"role": "user", "content": "hello"}]
    )
    assert list(offered(recorded)) == ["f", "apply_patch"]
    assert recorded.seen[-1].messages == [{"role": "user", "content": "hello"}]
    assert response.headers[IGNORED] == "input[0].tools[1], input[1].tools[1]"


HISTORY: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}}, "input[1]"),
    ({"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBO"}, "input[1]"),
    ({"type": "tool_search_call", "execution": "server", "arguments": {}, "call_id": None}, "input[1]"),
    ({"type": "additional_tools", "tools": []}, None),
]  # fmt: skip


@pytest.mark.parametrize(("item", "ignored"), HISTORY)
async def test_what_another_server_ran_is_left_out_of_the_history(
    client: httpx.AsyncClient, recorded: RecordingChat, item: dict[str, Any], ignored: str | None
) -> None:
    user = {"role": "user", "content": "hello"}
    response = await posted(client, input=[user, item])
    assert recorded.seen[-1].messages == [user]
    assert response.headers.get(IGNORED) == ignored


async def test_a_local_shells_call_stays_in_the_history(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    action = {"type": "exec", "command": ["ls"]}
    shell = {
        "type": "local_shell_call",
        "id": "lsh_1",
        "call_id": "c",
        "status": "completed",
        "action": action,
    }
    output = {"type": "function_call_output", "call_id": "c", "output": "a.py"}
    await posted(client, input=[{"role": "user", "content": "hello"}, shell, output])
    _, turn, result = recorded.seen[-1].messages
    assert turn["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": action}
    assert (result["tool_call_id"], result["content"]) == ("c", "a.py")


async def test_what_agents_tell_each_other_is_text_of_the_user(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    """A client that takes the argument of a call for encrypted sends it on as such."""
    parts = [
        {"type": "input_text", "text": "Sender: /root"},
        {"type": "encrypted_content", "encrypted_content": "Say hi."},
    ]
    told = {"type": "agent_message", "author": "/root", "recipient": "/root/kid", "content": parts}
    await posted(client, input=[{"role": "user", "content": "hello"}, told])
    assert recorded.seen[-1].messages[1:] == [{"role": "user", "content": "Sender: /root\nSay hi."}]


CHOICES: list[tuple[Any, list[str]]] = [
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "mcp__demo__f"}]}, ["mcp__demo__f"]),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__demo"}]}, ["mcp__demo__f", "mcp__demo__edit"]),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "tool_search"}, WEB]},
     ["apply_patch", "tool_search"]),
]  # fmt: skip


@pytest.mark.parametrize(("choice", "names"), CHOICES)
async def test_a_choice_may_name_tools_of_every_type(
    client: httpx.AsyncClient, recorded: RecordingChat, choice: Any, names: list[str]
) -> None:
    await posted(client, tools=TOOLS, tool_choice=choice)
    assert list(offered(recorded)) == names


def test_types_of_any_length_are_looked_at_in_little_time() -> None:
    body = ResponsesRequest(input="hello", tools=[ResponseTool(type="x" * 2**20) for _ in range(8)])
    start = time.process_time()
    assert tools_of(body, FieldNames({})).tools == []
    assert time.process_time() - start < 0.2
