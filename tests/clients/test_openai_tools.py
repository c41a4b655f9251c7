"""The official Python client: structured output, tools and reasoning, parsed by its own helpers.

What a request enforces is asked of the real model, whose own words mean nothing here; what a model chooses to
say comes from the scripted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pytest
from headway_testing.daemon import Server
from headway_testing.scripted_process import TURN
from pydantic import BaseModel, Field

MODEL = "demo-tools"
USER: Any = {"role": "user", "content": "import os"}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'


class Item(BaseModel, extra="forbid"):
    """Something of which every text has a bound, so that it ends."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]
    name: Annotated[str, Field(max_length=12)]
    tags: Annotated[list[Literal["a", "b"]], Field(max_length=3)]


class get_weather(BaseModel, extra="forbid"):  # the name of the tool
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


class set_alarm(BaseModel, extra="forbid"):
    """Sets an alarm."""

    hour: Annotated[int, Field(ge=0, le=23)]


WEATHER: Any = openai.pydantic_function_tool(get_weather)
ALARM: Any = openai.pydantic_function_tool(set_alarm)
TYPES = {"get_weather": get_weather, "set_alarm": set_alarm}


def opened(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(tools_server: Server) -> Iterator[openai.OpenAI]:
    yield from opened(tools_server)


@pytest.fixture(scope="module")
def scripted(scripted_server: Server) -> Iterator[openai.OpenAI]:
    yield from opened(scripted_server)


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=MODEL, messages=[USER], response_format=Item, max_tokens=200, seed=seed
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Item)


def test_each_of_several_choices_is_parsed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[USER], response_format=Item, max_tokens=200, n=3, seed=1, temperature=1.2
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    assert all(isinstance(choice.message.parsed, Item) for choice in answer.choices)


def test_the_stream_helper_ends_with_the_object_of_parse(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 200, "seed": 5}
    whole = client.chat.completions.parse(response_format=Item, **fields)
    for stream in (client.chat.completions.stream, client.beta.chat.completions.stream):
        with stream(response_format=Item, **fields) as events:
            partial = [event.parsed for event in events if event.type == "content.delta"]
            final = events.get_final_completion()
        assert len(partial) > 1
        assert final.choices[0].message.parsed == whole.choices[0].message.parsed
        assert isinstance(final.choices[0].message.parsed, Item)


def test_json_mode_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[USER], response_format={"type": "json_object"}, max_tokens=400, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    else:
        assert (answer.choices[0].message.content or "").lstrip().startswith("{")


def test_completions_take_the_forms_of_other_servers(client: openai.OpenAI) -> None:
    def text(**form: Any) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="x = ", max_tokens=60, temperature=0, extra_body=form
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert text(guided_choice=["alpha", "beta"]) in ("alpha", "beta")
    assert text(structured_outputs={"choice": ["alpha", "beta"]}) in ("alpha", "beta")
    assert text(guided_regex="[0-9]{3}-[0-9]{4}")[3] == "-"
    assert text(structured_outputs={"regex": "[a-c]{5}"}).strip("abc") == ""
    assert text(guided_grammar='start: "yes" | "no"') in ("yes", "no")
    assert set(json.loads(text(guided_json=get_weather.model_json_schema()))) == {"city", "days"}


def test_a_required_tool_is_called_with_valid_arguments(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=MODEL, messages=[USER], tools=[WEATHER, ALARM], tool_choice="required", max_tokens=200, seed=seed,
            parallel_tool_calls=False,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.choices[0].message.content is None
        assert isinstance(call.function.parsed_arguments, TYPES[call.function.name])


@pytest.mark.parametrize("name", TYPES)
def test_a_named_tool_is_called_whole_and_streamed(client: openai.OpenAI, name: str) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "messages": [USER], "tools": [WEATHER, ALARM], "max_tokens": 200, "seed": 7,
        "tool_choice": {"type": "function", "function": {"name": name}}, "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.parse(**fields)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.function.name == name
    assert isinstance(call.function.parsed_arguments, TYPES[name])
    with client.chat.completions.stream(**fields) as events:
        final = events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def ask(client: openai.OpenAI, script: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": script}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "tools": [WEATHER, ALARM], "max_tokens": 400} | fields
    )


def test_calls_that_the_model_chooses_are_told_beside_its_text(scripted: openai.OpenAI) -> None:
    (choice,) = ask(scripted, f"I look it up.\n{CALL}\n{OTHER_CALL}").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "I look it up."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"city": "Paris", "days": 3},
        {"city": "Rome", "days": 1},
    ]
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_streamed_deltas_make_the_whole_calls(scripted: openai.OpenAI) -> None:
    chunks = list(ask(scripted, f"I look it up.\n{CALL}\n{OTHER_CALL}", stream=True))
    content, calls = "", dict[int, dict[str, str]]()
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        content += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            if delta.index not in calls:
                assert delta.id
                assert delta.type == "function"
                assert delta.function.name
                calls[delta.index] = {"name": delta.function.name, "arguments": ""}
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert content.strip() == "I look it up."
    assert [json.loads(call["arguments"])["city"] for call in calls.values()] == ["Paris", "Rome"]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"


def test_one_call_alone_comes_where_parallel_ones_are_refused(scripted: openai.OpenAI) -> None:
    (choice,) = ask(scripted, f"{CALL}\n{OTHER_CALL}", parallel_tool_calls=False).choices
    assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Paris"]
    assert choice.finish_reason == "tool_calls"


def test_a_conversation_goes_on_with_the_results_of_its_calls(scripted: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": f"{CALL}{TURN}It rains."}]
    first = ask(scripted, "", messages=messages).choices[0].message
    messages.append(first)
    messages.append({"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"rain": true}'})
    last = ask(scripted, "", messages=messages).choices[0]
    assert (last.message.content, last.finish_reason, last.message.tool_calls) == ("It rains.", "stop", None)


@pytest.mark.parametrize(
    "text",
    ["<tool_call>\n{'name': get_weather}\n</tool_call>", '<tool_call>\n{"name": "get_w', "a <tool_call> b", "{}"],
    ids=["no-json", "cut", "tag-in-text", "object"],
)  # fmt: skip
def test_text_that_is_no_call_is_content_and_nothing_is_lost(scripted: openai.OpenAI, text: str) -> None:
    (choice,) = ask(scripted, text).choices
    assert (choice.message.content, choice.message.tool_calls) == (text, None)
    assert choice.finish_reason == "stop"


def test_reasoning_is_told_apart_whole_and_streamed(scripted: openai.OpenAI) -> None:
    script = f"<think>\nThey ask for Paris.\n</think>\n\nI look it up.\n{CALL}"
    whole = ask(scripted, script)
    message = whole.choices[0].message
    assert message.reasoning_content.strip() == message.reasoning.strip() == "They ask for Paris."
    assert message.content.strip() == "I look it up."
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    assert whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    deltas = [c.choices[0].delta for c in ask(scripted, script, stream=True) if c.choices]
    told = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert told == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_a_stream_of_a_cut_answer_ends_by_length(scripted: openai.OpenAI) -> None:
    (choice,) = ask(scripted, CALL, max_tokens=6).choices
    assert choice.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no_such"}}}, "no_such"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": 3}, "strict": True}}}, "not"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
    ids=["unknown-tool", "tool-choice", "name", "schema", "form", "no-tools"],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    scripted: openai.OpenAI, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(scripted, "hello", **fields)
    assert named in f"{raised.value.param} {raised.value.message}"
