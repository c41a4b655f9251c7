"""The Responses API through the official Python client and openai-agents.

What a request enforces is asked of the real model, whose own words mean nothing here; what a model chooses to
say comes from the scripted one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from headway_testing.client_session import told_by
from headway_testing.daemon import Server
from headway_testing.response_stream import EVENTS
from headway_testing.scripted_process import TURN
from openai.types.responses import Response
from pydantic import BaseModel, Field

MODEL = "demo-tools"
SESSION = Path(__file__).parent / "openai_agents_session.py"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
OTHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
THOUGHT = "<think>\nThey ask for Paris.\n</think>\n\n"


class Item(BaseModel, extra="forbid"):
    """Something of which every text has a bound, so that it ends."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


class get_weather(BaseModel, extra="forbid"):  # the name of the tool
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def flat(tool: Any) -> Any:
    """A tool of a chat in the form of this API."""
    return {"type": "function", **tool["function"]}


WEATHER = flat(openai.pydantic_function_tool(get_weather))


def opened(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(tools_server: Server) -> Iterator[openai.OpenAI]:
    yield from opened(tools_server)


@pytest.fixture(scope="module")
def scripted(scripted_server: Server) -> Iterator[openai.OpenAI]:
    yield from opened(scripted_server)


def ask(client: openai.OpenAI, script: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "input": script, "tools": [WEATHER], "max_output_tokens": 400}
    return client.responses.create(**body | fields)


def test_an_answer_is_of_the_clients_types(scripted: openai.OpenAI) -> None:
    answer = ask(scripted, f"{THOUGHT}I look it up.\n{CALL}\n{OTHER_CALL}", instructions="Be brief.")
    Response.model_validate(answer.to_dict(mode="json"), strict=True)
    thought, message, first, second = answer.output
    assert thought.content[0].text == "They ask for Paris."
    assert answer.output_text == message.content[0].text == "I look it up."
    assert [json.loads(call.arguments)["city"] for call in (first, second)] == ["Paris", "Rome"]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.status == "completed"


def test_every_event_of_a_stream_is_of_the_clients_types(scripted: openai.OpenAI) -> None:
    events = list(ask(scripted, f"{THOUGHT}I look it up.\n{CALL}", stream=True))
    for i, event in enumerate(events):
        EVENTS.validate_python(event.to_dict(mode="json"), strict=True)
        assert event.sequence_number == i
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1].response.output_text == "I look it up."


def test_the_stream_helper_ends_with_the_whole_answer(scripted: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": f"Well.\n{CALL}", "tools": [WEATHER]}
    with scripted.responses.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    _, call = final.output
    assert final.output_text == "Well."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Paris", "days": 3}


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.responses.parse(
            model=MODEL, input="import os", text_format=Item, max_output_tokens=200, extra_body={"seed": seed}
        )
        assert answer.status == "completed"
        assert isinstance(answer.output_parsed, Item)
        with client.responses.stream(
            model=MODEL, input="import os", text_format=Item, max_output_tokens=200, extra_body={"seed": seed}
        ) as stream:
            final = stream.get_final_response()
        assert final.output_parsed == answer.output_parsed


def test_a_required_tool_is_called_with_valid_arguments(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = ask(client, "import os", tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", "get_weather")
        get_weather.model_validate_json(call.arguments)


def test_a_conversation_goes_on_with_the_results_of_its_calls(scripted: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": f"{THOUGHT}{CALL}\n{OTHER_CALL}{TURN}It rains."}]
    first = ask(scripted, history)
    history += first.output
    for item in first.output:
        if item.type == "function_call":
            history.append({"type": "function_call_output", "call_id": item.call_id, "output": "rain"})
    last = ask(scripted, history)
    assert (last.output_text, [item.type for item in last.output]) == ("It rains.", ["message"])
    assert last.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_a_cut_answer_is_incomplete(scripted: openai.OpenAI) -> None:
    answer = ask(scripted, CALL, max_output_tokens=6)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"), ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": 3}, "strict": True}}}, "text.format.schema"), ({"background": True}, "background"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    scripted: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(scripted, "hello", **fields)
    assert raised.value.param is not None
    assert raised.value.param.startswith(param)


def test_an_answer_is_not_kept_and_the_client_is_told_so(scripted: openai.OpenAI) -> None:
    answer = ask(scripted, "hello", store=True)
    for method in (scripted.responses.retrieve, scripted.responses.delete, scripted.responses.cancel):
        with pytest.raises(openai.BadRequestError, match="no answer is kept"):
            method(answer.id)


def test_openai_agents_calls_its_tool_and_answers(scripted_server: Server, environment: Path) -> None:
    told = told_by(environment / "python", SESSION, scripted_server)
    assert told["called"] == [[6, 7], [6, 7]]
    assert told["output"] == told["streamed"] == "It is 42."
    assert told["again"] == "It is still 42."
    assert told["deltas"] == "I look it up.It is 42."
    assert told["kinds"] == [
        "reasoning_item", "message_output_item", "tool_call_item", "tool_call_output_item", "message_output_item",
    ]  # fmt: skip
    assert told["usage"] == 2
