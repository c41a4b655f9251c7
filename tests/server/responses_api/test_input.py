"""Bodies of /v1/responses: what the chat template is given of them, and what is refused by which path."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from headway_testing.fake_chat import FakeChat, RecordingChat, RoleLines
from headway_testing.fake_engine import FakeEngine
from headway_testing.fake_services import fake_services

from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.base.field_names import FieldNames
from headway.server.grammar.grammars import Grammars
from headway.server.protocol.decoding import decode
from headway.server.protocol.responses_api import ResponsesRequest
from headway.server.requests.services import Services
from headway.server.responses_api.carried_reasoning import carried
from headway.server.responses_api.chat import as_chat
from headway.server.text.tokenizer import Tokenizer

URL = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# fmt: off
WEATHER = {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": SCHEMA, "strict": False}
TIME = {"type": "function", "name": "time"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Paris"}', "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": None}
ANSWER = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "final_answer",
          "content": [{"type": "output_text", "text": "It rains.", "annotations": [], "logprobs": []}]}
# fmt: on


@pytest.fixture
def recorded() -> RecordingChat:
    return RecordingChat()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, recorded: FakeChat, grammars: Grammars) -> Services:
    template = "{{ tools }}<tool_call>{{ enable_thinking }}"
    return fake_services(engine, tokenizer, recorded, template=template, grammars=grammars)


async def rendered(client: httpx.AsyncClient, recorded: RecordingChat, **body: Any) -> Conversation:
    response = await client.post(URL, json={"input": "hello", "max_output_tokens": 2, **body})
    assert response.status_code == 200, response.text
    return recorded.seen[-1]


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"input": "hello", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def text(words: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": words}


def called(*names: str) -> list[dict[str, Any]]:
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": {"city": "Paris"}}}
        for i, name in enumerate(names, 1)
    ]


THINKING = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "hm")
INPUTS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "text": ("hello", [user("hello")]),
    "messages": (
        [user("a"), user([text("b"), text("c")], type="message"), ANSWER, user("d")],
        [user("a"), user("b\nc"), {"role": "assistant", "content": "It rains."}, user("d")],
    ),
    "roles": (
        [{"role": "developer", "content": "x"}, user("a"), {"role": "system", "content": "y"}],
        [{"role": "system", "content": "x"}, user("a"), {"role": "system", "content": "y"}],
    ),
    "system at the beginning": (
        [{"role": "developer", "content": [text("x"), text("y")]}, {"role": "system", "content": "z"}, user("a")],
        [{"role": "system", "content": "x\ny\nz"}, user("a")],
    ),
    "a turn of an assistant": (
        [user("a"), THOUGHT, ANSWER, CALL, {**CALL, "call_id": "call_2", "name": "time"}, OUTPUT, {**OUTPUT, "call_id": "call_2"}],
        [
            user("a"), {"role": "assistant", "content": "It rains.", "tool_calls": called("weather", "time"), **THINKING},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"}, {"role": "tool", "content": "rain", "tool_call_id": "call_2"},
        ],
    ),
    "turns of an assistant": (
        [user("a"), CALL, OUTPUT, THOUGHT, {**CALL, "call_id": "call_1"}, {**OUTPUT, "output": [text("b"), text("c")]}, ANSWER],
        [
            user("a"), {"role": "assistant", "content": "", "tool_calls": called("weather")},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "", "tool_calls": called("weather"), **THINKING},
            {"role": "tool", "content": "b\nc", "tool_call_id": "call_1"}, {"role": "assistant", "content": "It rains."},
        ],
    ),
    "texts around a call": (
        [user("a"), ANSWER, CALL, ANSWER, OUTPUT],
        [
            user("a"), {"role": "assistant", "content": "It rains.\nIt rains.", "tool_calls": called("weather")},
            {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        ],
    ),
    "two answers": (
        [user("a"), ANSWER, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains."}, {"role": "assistant", "content": "It rains."}],
    ),
    "a summary in place of the reasoning": (
        [user("a"), {"type": "reasoning", "summary": [text("hm", "summary_text")]}, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains.", **THINKING}],
    ),
    "reasoning that was carried": (
        [user("a"), {"type": "reasoning", "summary": [], "encrypted_content": carried("hm")}, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains.", **THINKING}],
    ),
    "reasoning in clear before what was carried, and that before a summary": (
        [user("a"), {**THOUGHT, "encrypted_content": carried("no")}, ANSWER, user("b"),
         {"type": "reasoning", "summary": [text("no", "summary_text")], "encrypted_content": carried("hm")}, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains.", **THINKING}, user("b"),
         {"role": "assistant", "content": "It rains.", **THINKING}],
    ),
    "reasoning that nobody can read": (
        [user("a"), {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains."}],
    ),
    "several thoughts": (
        [user("a"), THOUGHT, {"type": "reasoning", "summary": [text("so", "summary_text"), text("on", "summary_text")]}, ANSWER],
        [user("a"), {"role": "assistant", "content": "It rains.", **dict.fromkeys(THINKING, "hm\nso\non")}],
    ),
    "a thought without an answer": ([THOUGHT, user("a")], [{"role": "assistant", "content": "", **THINKING}, user("a")]),
    "a refusal": (
        [user("a"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [user("a"), {"role": "assistant", "content": "no"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INPUTS)
async def test_items_reach_the_template_as_messages(
    client: httpx.AsyncClient, recorded: RecordingChat, name: str
) -> None:
    items, messages = INPUTS[name]
    assert (await rendered(client, recorded, input=items)).messages == messages


async def test_instructions_are_the_first_system_message(
    client: httpx.AsyncClient, recorded: RecordingChat
) -> None:
    """With messages of developers behind them, because many templates take one at the beginning alone."""
    items = [{"role": "developer", "content": [text("x")]}, user("a"), {"role": "developer", "content": "y"}]
    seen = await rendered(client, recorded, input=items, instructions="Be brief.")
    assert seen.messages == [
        {"role": "system", "content": "Be brief.\nx"},
        user("a"),
        {"role": "system", "content": "y"},
    ]
    seen = await rendered(client, recorded, instructions="Be brief.")
    assert seen.messages == [{"role": "system", "content": "Be brief."}, user("hello")]
    assert (await rendered(client, recorded, instructions="")).messages == [user("hello")]


async def test_an_answer_goes_back_as_it_came(
    client: httpx.AsyncClient, recorded: RecordingChat, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Item by item, as clients without a store do."""
    said = 'Hm.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    engine.script = lambda request: [*tokenizer.encode_plain(said), tokenizer.stop_token_ids[0]]
    first = (await client.post(URL, json={"input": [user("a")], "tools": [WEATHER]})).json()
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    seen = await rendered(client, recorded, input=[user("a"), *first["output"], result], tools=[WEATHER])
    (expected,) = called("weather")
    assert seen.messages[1:] == [
        {"role": "assistant", "content": "Hm.", "tool_calls": [{**expected, "id": call["call_id"]}]},
        {"role": "tool", "content": "rain", "tool_call_id": call["call_id"]},
    ]


FORM = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True, "description": "A place."}
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"messages": [user("hello")], "logprobs": False}),
    ({"max_output_tokens": 7, "temperature": 0, "top_p": 0.5, "seed": 3, "stream": True, "model": "m"},
     {"max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "seed": 3, "stream": True, "model": "m"}),
    ({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}, {"logprobs": True}),
    ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}), ({"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}),
    ({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"response_format": {"type": "text"}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": FORM}}, {"response_format": {"type": "json_schema", "json_schema": {k: v for k, v in FORM.items() if k != "type"}}}),
    ({"text": {}}, {}), ({"structured_outputs": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
    ({"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning_effort": "high"}), ({"reasoning": {}}, {}),
    ({"tools": [WEATHER]}, {"tools": [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]}),
    ({"tools": [TIME], "tool_choice": {"type": "function", "name": "time"}},
     {"tools": [{"type": "function", "function": {"name": "time"}}], "tool_choice": {"type": "function", "function": {"name": "time"}}}),
    ({"tools": [WEATHER, TIME], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}},
     {"tools": [{"type": "function", "function": {"name": "time"}}], "tool_choice": "required"}),
    ({"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False},
     {"tools": [{"type": "function", "function": {"name": "time"}}], "tool_choice": "required", "parallel_tool_calls": False}),
    ({"stream_options": {"include_obfuscation": False, "include_usage": True}, "store": True, "tools": []}, {}),
    ({"chat_template_kwargs": {"a": 1}, "documents": [{}], "thinking_budget_tokens": 5, "include_reasoning": False, "priority": 1, "cache_salt": "x"},
     {"chat_template_kwargs": {"a": 1}, "documents": [{}], "thinking_budget_tokens": 5, "include_reasoning": False, "priority": 1, "cache_salt": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "chat"), FIELDS)
def test_fields_become_those_of_a_chat(body: dict[str, Any], chat: dict[str, Any]) -> None:
    request = decode(msgspec.json.encode({"input": "hello", **body}), ResponsesRequest)
    translated, *_ = as_chat(request)
    expected = {"messages": [user("hello")], "logprobs": False, **chat}
    found = msgspec.to_builtins(translated)
    assert without_nulls(found) == expected


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def choice(**more: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, TIME], "tool_choice": more}


def item(**more: Any) -> dict[str, Any]:
    return {"input": [user("a"), more]}


def form(**more: Any) -> dict[str, Any]:
    return {"text": {"format": more}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "is missing"), ({"input": []}, "input", "empty"), ({"input": {}}, "input", "a string or an array"),
    ({"input": ["x"]}, "input[0]", "an object"), ({"input": [user("a")] * 4097}, "input", "at most 4096"),
    (item(type="item_reference", id="msg_1"), "input[1].type", "store: false"), (item(type="shell_call", id="sh_1"), "input[1].type", "'function_call'"),
    (item(type="compaction", encrypted_content="x"), "input[1].type", "'compaction'"),
    (item(content="x"), "input[1].role", "is missing"), (item(role="tool", content="x"), "input[1].role", "'developer'"),
    (item(role="user"), "input[1].content", "is missing"), (item(role="user", content=5), "input[1].content", "a string or an array"),
    (item(role="user", content=[text("a"), {"type": "input_image", "image_url": "data:"}]), "input[1].content[1].type", "'input_image'"),
    (item(role="user", content=[{"type": "input_file", "file_id": "f"}]), "input[1].content[0].type", "'input_file'"),
    (item(type="function_call", arguments="{}"), "input[1].name", "is missing"), (item(**{**CALL, "arguments": 5}), "input[1].arguments", "a string or an object"),
    (item(type="function_call_output", call_id="c"), "input[1].output", "is missing"),
    (item(type="reasoning", summary=[{"type": "image", "text": "x"}]), "input[1].summary[0].type", "'image'"),
    (item(type="reasoning", summary=[], content=[{"type": "reasoning_text"}]), "input[1].content[0].type", "have a text"),
    (item(type="reasoning", summary=[], encrypted_content=carried("hm")[:-4]), "input[1].encrypted_content", "send the item unchanged"),
    (item(type="reasoning", summary=[], encrypted_content=5), "input[1].encrypted_content", "a string"),
    ({"input": [CALL] * 129}, "input[0]", "at most 128"),
    ({"input": [{"role": "system", "content": "a"}, {"role": "developer", "content": [text("b"), {"type": "input_image"}]}, user("c")], "instructions": "x"},
     "input[1].content[1].type", "'input_image'"),
    ({"tools": [TIME] * 513}, "tools", "at most 512"), ({"tools": [{}]}, "tools[0].type", "is missing"), ({"tools": [TIME, {"type": "function"}]}, "tools[1].name", "is missing"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [TIME, {"type": "functoin", "name": "x"}]}, "tools[1].type", "did you mean 'function'?"),
    ({"tools": [TIME, {"type": "custom"}]}, "tools[1].name", "is missing"), ({"tools": [{"type": "namespace", "tools": [TIME]}]}, "tools[0].name", "is missing"),
    ({"tools": [{"type": "namespace", "name": "g", "tools": [WEATHER, {**TIME, "name": "a b"}]}]}, "tools[0].tools[1].name", "'g__a b'"),
    ({"tools": [{"type": "namespace", "name": "g", "tools": [TIME]}, {**TIME, "name": "g__time"}]}, "tools[1].name", "than that of tools[0].tools[0]"),
    ({"tools": [{"type": "namespace", "name": str(i), "tools": [TIME] * 4} for i in range(512)]}, "tools", "at most 2048"),
    ({"tools": [{"type": "namespace", "name": "g", "tools": [{**TIME, "name": f"t{i}"} for i in range(513)]}]}, "tools", "at most 512"),
    (item(type="custom_tool_call", call_id="c", input="x"), "input[1].name", "is missing"),
    (item(type="custom_tool_call_output", call_id="c"), "input[1].output", "is missing"),
    (item(type="additional_tools", tools=[{"type": "functoin"}]), "input[1].tools[0].type", "'function'"),
    ({"tools": [{"type": "function", "function": {"name": "time"}}]}, "tools[0].function", "beside `type`"),
    ({"tools": [{**TIME, "paramters": {}}]}, "tools[0].paramters", "did you mean tools[0].parameters?"),
    ({"tools": [TIME, TIME]}, "tools[1].name", "another name than that of tools[0]"), ({"tools": [{**TIME, "name": "a b"}]}, "tools[0].name", "'a b'"),
    ({"tools": [{**WEATHER, "strict": True, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools[0].parameters", "not"),
    (choice(type="function"), "tool_choice.name", "is missing"), (choice(type="function", name="x"), "tool_choice.name", "(weather, time)"),
    (choice(type="web_search_preview"), "tool_choice.type", "'allowed_tools'"), (choice(type="allowed_tools", mode="none", tools=[]), "tool_choice.mode", "'auto'"),
    (choice(type="allowed_tools", mode="auto", tools=[{"type": "function", "name": "x"}]), "tool_choice.tools[0].name", "'x'"),
    (choice(type="allowed_tools", mode="auto"), "tool_choice.tools", "is missing"),
    (choice(type="allowed_tools", mode="auto", tools=[{"type": "funcion"}]), "tool_choice.tools[0].type", "'function'"),
    (choice(type="allowed_tools", mode="required", tools=[{"type": "mcp"}]), "tool_choice", "no tools"), (choice(type="custom", name="x"), "tool_choice.name", "'x'"),
    (choice(type="allowed_tools", mode="required", tools=[]), "tool_choice", "no tools"), ({"tools": [TIME], "tool_choice": "any"}, "tool_choice", "'required'"),
    (form(type="yaml"), "text.format.type", "json_schema"), (form(type="json_schema", name="x"), "text.format.schema", "is missing"),
    (form(type="json_schema", name="x", strict=True, schema={"type": "object", "not": 3}), "text.format.schema", "not"),
    (form(type="json_schema", name="x" * 65, schema={}), "text.format.name", "at most 64"),
    ({**form(type="json_object"), "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "text.format and structured_outputs.regex"),
    ({"text": {"formt": {}}}, "text.formt", "text.format"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "one of none"), ({"reasoning": {"effort": "high"}, "chat_template_kwargs": {"enable_thinking": False}},
                                                                              "reasoning.effort", "contradict"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1 to"), ({"max_output_tokens": 1000}, "max_output_tokens", "maximum context length"),
    ({"max_output_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_output_tokens = 5"), ({"min_tokens": 10**6}, "min_tokens", "max_output_tokens"),
    ({"temperature": 3}, "temperature", "0 to 2"), ({"top_logprobs": 21}, "top_logprobs", "0 to 20"), ({"seed": 1.5}, "seed", "an integer"),
    ({"include": ["file_search_call.results"]}, "include[0]", "reasoning.encrypted_content"), ({"metadata": {"a": 1}}, "metadata", "a string"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"), ({"stream_options": {"include_usag": 1}}, "stream_options.include_usag", "stream_options.include_usage"),
    ({"speculation": {"draft_positions": True}}, "speculation.draft_positions", "/v1/chat/completions"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "the whole conversation as `input`"), ({"conversation": "conv_1"}, "conversation", "`input`"),
    ({"background": True}, "background", "`stream`"), ({"truncation": "auto"}, "truncation", "`truncate_prompt_tokens`"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt", "`instructions`"), ({"typical_p": 0.5}, "typical_p", "`top_p`"),
    ({"messages": [user("a")]}, "messages", "`input`"), ({"max_tokens": 5, "max_output_tokens": 6}, "max_tokens", "max_output_tokens is 6"),
    ({"response_format": {"type": "json_object"}}, "response_format", "`text.format`"), ({"n": 2}, "n", "several times"),
    ({"inpt": "x"}, "inpt", "did you mean input?"), ({"max_output_token": 5}, "max_output_token", "did you mean max_output_tokens?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"), WRONG, ids=[f"{i}-{p}" for i, (_, p, _) in enumerate(WRONG)]
)
async def test_what_is_wrong_is_told_by_its_own_path(
    client: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal(client, **body)
    assert error["param"] == param, error
    assert words in error["message"]
    assert not any(
        name in error["message"]
        for name in ("messages[", "max_completion_tokens", "json_schema.", ".function.", "reasoning_effort")
    )
    assert not engine.submitted


class TestTheTextItself:
    @pytest.fixture
    def recorded(self) -> RoleLines:
        return RoleLines()

    async def test_an_input_that_is_too_long_is_named(self, client: httpx.AsyncClient) -> None:
        for given in ("hello " * 400, [user("hello " * 400)]):
            error = await refusal(client, input=given)
            assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_another_model_is_404(client: httpx.AsyncClient) -> None:
    response = await client.post(URL, json={"input": "x", "model": "gpt-4o"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_value_in_quotes_keeps_its_words() -> None:
    names = FieldNames(
        {"tools[0].function": "tools[3]", "max_tokens": "max_output_tokens", "messages[1]": "input[4]"}
    )
    message = "tools[0].function.name is 'max_tokens', see messages[1].content[2].text; messages are fine, max_tokens is 1"
    error = names.renamed(ApiError(message, param="messages[1].role", code="invalid_value"))
    assert (
        str(error)
        == "tools[3].name is 'max_tokens', see input[4].content[2].text; messages are fine, max_output_tokens is 1"
    )
    assert (error.param, error.code, error.status) == ("input[4].role", "invalid_value", 400)
    assert names.own("messages[10].role") == "messages[10].role"


async def test_keywords_that_are_not_enforced_are_told_by_the_paths_of_the_request(
    client: httpx.AsyncClient,
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "name": "f", "parameters": schema}
    form = {"type": "json_schema", "name": "a", "schema": schema}
    for body, path in (
        ({"tools": [tool], "tool_choice": "required"}, "tools[0].parameters"),
        ({"text": {"format": form}}, "text.format.schema"),
    ):
        response = await client.post(URL, json={"input": "hello", "max_output_tokens": 2, **body})
        assert response.status_code == 200, response.text
        assert response.headers["x-headway-ignored"] == f"{path}.properties.a.uniqueItems"
