"""Bodies of Anthropic's Messages API as chats, and refusals by the names of that API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError
from headway.server.messages_api.translation import ThinkingModel, Translation, translate
from headway.server.protocol.chat import template_messages
from headway.server.protocol.decoding import decode
from headway.server.protocol.messages_api import MessagesRequest
from headway.server.protocol.tools import NamedChoice, template_tools
from headway.server.text.template_limits import TemplateLimits, folded

HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
SWITCH = ThinkingModel("{% if enable_thinking %}", is_bounded=True)
EFFORT = ThinkingModel("{{ reasoning_effort }}", is_bounded=True)
SILENT = ThinkingModel("{{ messages }}")


def translated(model: ThinkingModel | None = None, **body: Any) -> Translation:
    whole = {"model": "m", "max_tokens": 5, "messages": [HELLO], **body}
    return translate(decode(json.dumps(whole).encode(), MessagesRequest), model)


def messages_of(*messages: Any, **body: Any) -> list[dict[str, Any]]:
    """As the chat template sees them."""
    chat = translated(messages=messages, **body).chat
    return template_messages(chat.messages)


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(call_id: str = "toolu_1", **arguments: Any) -> dict[str, Any]:
    return {
        "type": "tool_use",
        "id": call_id,
        "name": "weather",
        "input": arguments,
        "caller": {"type": "direct"},
    }


def result(content: Any, call_id: str = "toolu_1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def refused(**body: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        translated(**body)
    return raised.value


@pytest.mark.parametrize(
    "given", ["be brief\nand kind", [text("be brief", cache_control=EPHEMERAL), text("and kind")]]
)
def test_the_system_is_the_first_message(given: Any) -> None:
    assert messages_of(HELLO, system=given) == [
        {"role": "system", "content": "be brief\nand kind"},
        {"role": "user", "content": "hello"},
    ]


@pytest.mark.parametrize("is_block", [True, False])
def test_what_claude_code_says_of_its_bill_is_no_part_of_the_system(is_block: bool) -> None:
    bill = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;"
    given = [text(bill), text("be brief")] if is_block else f"{bill}\nbe brief"
    assert messages_of(HELLO, system=given)[0] == {"role": "system", "content": "be brief"}
    assert messages_of(HELLO, system=[text(bill)]) == [HELLO]
    assert messages_of({"role": "user", "content": bill}) == [{"role": "user", "content": bill}]


def test_calls_results_and_thoughts_reach_the_template() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "abc"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    seen = messages_of(
        HELLO,
        assistant(thought, redacted, text("I look", citations=None), use(city="Oslo"), use("toolu_2")),
        user(
            result("rain"),
            result([text("a"), text("b")], "toolu_2", cache_control=EPHEMERAL),
            text("and now?"),
        ),
    )
    assert seen[1]["content"] == "I look"
    assert seen[1]["reasoning_content"] == "hm"
    assert [(call["id"], call["function"]) for call in seen[1]["tool_calls"]] == [
        ("toolu_1", {"name": "weather", "arguments": {"city": "Oslo"}}),
        ("toolu_2", {"name": "weather", "arguments": {}}),
    ]
    assert seen[2:] == [
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "a\nb", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "and now?"},
    ]


def test_a_result_may_be_empty_an_error_or_name_tools() -> None:
    empty = {"type": "tool_result", "tool_use_id": "a"}
    named = [{"type": "tool_reference", "tool_name": "weather"}]
    seen = messages_of(
        HELLO, assistant(use()), user(empty, result("no", "b", is_error=True), result(named, "c"))
    )
    assert [message["content"] for message in seen[2:]] == ["", "Error: no", "weather"]


def test_neighbours_of_one_role_are_one_turn() -> None:
    seen = messages_of(
        HELLO, user(text("a"), text("b")), assistant(text("c")), assistant(use()), user(result("d"))
    )
    assert [(message["role"], message["content"]) for message in seen] == [
        ("user", "hello\na\nb"),
        ("assistant", "c"),
        ("tool", "d"),
    ]
    assert len(seen[1]["tool_calls"]) == 1


def test_a_later_system_stays_at_its_place_or_joins_the_turn_before() -> None:
    said = [
        HELLO,
        system("now"),
        assistant(use()),
        user(result("rain")),
        system([text("later")]),
        assistant(text("ok")),
        system("end"),
    ]
    seen = messages_of(*said, system="first")
    assert [message["role"] for message in seen] == [
        "system", "user", "system", "assistant", "tool", "system", "assistant", "system",
    ]  # fmt: skip
    limits = TemplateLimits(late_system=False)
    told = folded(Conversation(seen), limits).conversation.messages
    assert [(message["role"], message["content"]) for message in told] == [
        ("system", "first"), ("user", "hello\nnow"), ("assistant", ""), ("tool", "rain\nlater"), ("assistant", "ok"),
        ("user", "end"),
    ]  # fmt: skip
    begun = messages_of(system("first"), HELLO)
    assert folded(Conversation(begun), limits).conversation.messages == begun


def test_a_conversation_that_ends_with_an_answer_goes_on_with_it() -> None:
    assert translated().chat.continue_final_message is None
    assert translated(messages=[HELLO, assistant(text("Well"))]).chat.continue_final_message
    error = refused(messages=[HELLO, assistant(text("Well"), use())])
    assert error.param == "messages[1].content[1]"
    assert "tool_result" in str(error)


def test_tools_and_their_choice_are_those_of_a_chat() -> None:
    kept = {
        "cache_control": EPHEMERAL,
        "eager_input_streaming": True,
        "defer_loading": True,
        "input_examples": [{}],
    }
    chat = translated(
        tools=[WEATHER | kept, {"type": "custom", "name": "time", "input_schema": {}, "strict": True}]
    ).chat
    assert template_tools(chat.tools) == [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
        },
        {"type": "function", "function": {"name": "time", "parameters": {}}},
    ]
    assert [tool.function and tool.function.strict for tool in chat.tools or ()] == [None, True]
    for kind, seen in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert translated(tools=[WEATHER], tool_choice={"type": kind}).chat.tool_choice == seen
    named = translated(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}).chat.tool_choice
    assert isinstance(named, NamedChoice)
    assert named.function is not None
    assert named.function.name == "weather"
    for disabled, parallel in ((True, False), (False, None), (None, None)):
        choice = {"type": "auto", "disable_parallel_tool_use": disabled}
        assert translated(tools=[WEATHER], tool_choice=choice).chat.parallel_tool_calls is parallel


def test_what_generates_is_the_chats() -> None:
    fields = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "stream": True}
    chat = translated(**fields, stop_sequences=["a", "b"]).chat
    assert {name: getattr(chat, name) for name in fields} == fields
    assert chat.stop_strings == ("a", "b")


THINKING: list[tuple[ThinkingModel, dict[str, Any], tuple[str | None, int | None]]] = [
    (SWITCH, {}, (None, None)),
    (SWITCH, {"thinking": {"type": "disabled"}}, ("none", None)),
    (SWITCH, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, ("high", 2000)),
    (SWITCH, {"thinking": {"type": "enabled"}}, ("high", None)),
    (SWITCH, {"thinking": {"type": "adaptive", "display": "summarized", "block_binding": {}}}, ("high", None)),
    (SWITCH, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, ("none", None)),
    (SWITCH, {"output_config": {"effort": "low"}}, ("low", None)),
    (EFFORT, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, ("max", None)),
    (EFFORT, {"thinking": {"type": "enabled", "budget_tokens": 9}}, (None, 9)),
    (EFFORT, {"thinking": {"type": "disabled"}}, ("none", None)),
    (SILENT, {"thinking": {"type": "enabled", "budget_tokens": 2000}, "output_config": {"effort": "high"}}, (None, None)),
    (SILENT, {"thinking": {"type": "disabled"}}, ("none", None)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "seen"), THINKING)
def test_thinking_is_asked_of_a_model_as_far_as_it_has_any(
    model: ThinkingModel, body: dict[str, Any], seen: tuple[str | None, int | None]
) -> None:
    chat = translated(model, **body).chat
    assert (chat.reasoning_effort, chat.thinking_budget_tokens) == seen


@pytest.mark.parametrize("path", ["output_config.format", "output_format"])
def test_a_schema_of_the_output_is_a_response_format(path: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    translation = translated(
        **{"output_format": form} if path == "output_format" else {"output_config": {"format": form}}
    )
    assert msgspec.to_builtins(translation.chat.response_format)["json_schema"]["schema"] == SCHEMA
    told = translation.told(
        ApiError(
            "response_format.json_schema.schema.not is x", param="response_format.json_schema.schema.not"
        )
    )
    assert (str(told), told.param) == (f"{path}.schema.not is x", f"{path}.schema.not")


def test_what_changes_nothing_is_accepted() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    neutral = {
        "context_management": {"edits": edits}, "cache_control": EPHEMERAL, "diagnostics": {"previous_message_id": None},
        "container": None, "mcp_servers": [], "speed": "standard", "inference_geo": "global", "fallbacks": [{"model": "x"}], "stop_sequences": [],
        "anthropic_version": "bedrock-2023-05-31", "service_tier": "auto",
    }  # fmt: skip
    assert translated(**neutral).chat == translated(stop_sequences=[]).chat


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
FORM = {"type": "json_schema", "schema": {}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "1 message or more"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1].type", "'image'"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0].type", "'document'"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "is missing"),
    ({"messages": [user(use())]}, "messages[0].content[0].type", "of the assistant"),
    ({"messages": [assistant(result("x"))]}, "messages[0].content[0].type", "of the user"),
    ({"messages": [HELLO, assistant({"type": "tool_use", "name": "x"})]}, "messages[1].content[0].id", "is missing"),
    ({"messages": [user({"type": "tool_result", "content": "x"})]}, "messages[0].content[0].tool_use_id", "is missing"),
    ({"messages": [system([IMAGE])]}, "messages[0].content[0].type", "'image'"),
    ({"system": [IMAGE]}, "system[0].type", "'image'"),
    ({"tools": [WEATHER, SEARCH]}, "tools[1].type", "'web_search_20250305'"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0].type", "'function'"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "is missing"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name", "is missing"),
    ({"tools": [WEATHER], "tool_choice": "auto"}, "tool_choice", "an object"),
    ({"tools": [WEATHER], "tool_choice": {"type": "required"}}, "tool_choice.type", "'any'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type", "no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name", "is missing"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "'between_tools'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "1 to"),
    ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display", "omitted"),
    ({"output_config": {"effort": "none"}}, "output_config.effort", "xhigh"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type", "'json_schema'"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", "is missing"),
    ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format", "left out"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type", "compact_20260112"),
    ({"max_tokens": None}, "max_tokens", "is missing"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "`tools` of your own"), ({"seed": 1}, "seed", "/v1/chat/completions"),
    ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget", "max_tokens"),
    ({"container": "c"}, "container", "the whole conversation"), ({"typical_p": 0.5}, "typical_p", "`top_p`"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "max_tokens is 5"), ({"stop_sequence": ["x"]}, "stop_sequence", "stop_sequences"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "words"), WRONG, ids=[f"{i}-{param}" for i, (_, param, _) in enumerate(WRONG)]
)
def test_what_is_wrong_is_told_by_its_path(body: dict[str, Any], param: str, words: str) -> None:
    error = refused(**body)
    assert (error.param, error.status) == (param, 400), str(error)
    assert param in str(error)
    assert words in str(error)


def test_a_thread_is_refused_by_the_code_at_which_clients_go_on_without() -> None:
    error = refused(thread={"type": "create"})
    assert (error.status, error.param, error.code) == (400, "thread", "thread_unsupported_request")
    assert translated(thread=None).chat == translated().chat


PATHS = [
    ("messages[0].content", "system"), ("messages[1].content", "messages[0].content"),
    ("messages[2].tool_calls[1].function.arguments.a[0]", "messages[1].content[2].input.a[0]"),
    ("messages[2].tool_calls[0].function.name", "messages[1].content[1].name"), ("messages[2].reasoning_content", "messages[1].content"),
    ("messages[2].tool_calls", "messages[1].content"), ("messages[3].content", "messages[2].content[0].content"),
    ("messages[3].tool_call_id", "messages[2].content[0].tool_use_id"), ("messages[4]", "messages[2]"), ("messages[9]", "messages[9]"),
    ("messages", "messages"), ("tools[0].function.parameters.not", "tools[0].input_schema.not"), ("tools[0].function.name", "tools[0].name"),
    ("tool_choice.function.name", "tool_choice.name"), ("stop", "stop_sequences"), ("stop_token_ids", "stop_token_ids"),
    ("thinking_budget_tokens", "thinking.budget_tokens"), ("reasoning_effort", "output_config.effort"), ("top_p", "top_p"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "told"), PATHS)
def test_errors_of_a_chat_are_told_by_the_paths_of_the_body(path: str, told: str) -> None:
    said = [HELLO, assistant(text("x"), use(), use("b", a=[1])), user(result("y"), text("z"))]
    translation = translated(messages=said, system="s", tools=[WEATHER])
    error = translation.told(ApiError(f"{path} is x, it must be y", param=path, status=404, code="c"))
    assert (error.param, str(error)) == (told, f"{told} is x, it must be y")
    assert (error.status, error.code) == (404, "c")
