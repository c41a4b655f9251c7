"""Structured output, tools and reasoning through HTTP, by the official client: of the real model and of a
scripted one.

`make test-clients` asks more of them, through more clients.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from headway_testing.daemon import Server
from headway_testing.schemas import random_schema
from headway_testing.scripted_process import TURN

pytestmark = pytest.mark.slow

MODEL = "demo-tools"
PROMPTS = ("def read_config(path):\n", "import os\n", "x = ", "# A list of colors\nCOLORS = ")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
SCRIPT = f"<think>\nSix and seven.\n</think>\n\nLet me see.\n{CALL}{TURN}It is 13."
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture
def agent(scripted: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(server: Server, body: dict[str, Any]) -> str:
    """The text of a stream."""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=120
    ) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def whole(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("num_schemas", [2, pytest.param(100, marks=pytest.mark.long)])
def test_a_text_of_a_schema_is_valid_and_the_same_streamed_and_beside_others(
    templated: Server, num_schemas: int
) -> None:
    bodies = []
    for number in range(num_schemas):
        chance = random.Random(number)
        schema = random_schema(chance)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        sampling = {"temperature": chance.choice([0, 0.7, 1.2]), "seed": number}
        prompt = chance.choice(PROMPTS)
        bodies += [{"prompt": prompt, "max_tokens": 300, **sampling, **form_of} for form_of in (
            {"response_format": form}, {"max_tokens": 30},
        )]  # fmt: skip
    alone = [whole(templated, body) for body in bodies]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda body: streamed(templated, body), bodies)) == [c["text"] for c in alone]
    stopped = 0
    for body, choice in zip(bodies, alone, strict=True):
        if "response_format" in body and choice["finish_reason"] == "stop":
            stopped += 1
            jsonschema.validate(json.loads(choice["text"]), body["response_format"]["json_schema"]["schema"])
    assert stopped >= 0.95 * num_schemas


def test_a_tool_that_must_be_called_is_called_with_valid_arguments(templated: Server) -> None:
    with openai.OpenAI(base_url=f"{templated.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "import os"}], tools=[ADD], max_tokens=200, seed=1,
            tool_choice={"type": "function", "function": {"name": "add"}}, parallel_tool_calls=False,
        )  # fmt: skip
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])


def test_an_agent_reasons_calls_and_answers_whole_and_streamed(agent: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    first = agent.chat.completions.create(model=MODEL, messages=messages, tools=[ADD], max_tokens=200)
    message: Any = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 6, "b": 7}
    assert (message.reasoning_content.strip(), message.content.strip()) == ("Six and seven.", "Let me see.")
    with agent.chat.completions.stream(model=MODEL, messages=messages, tools=[ADD], max_tokens=200) as events:
        final: Any = events.get_final_completion().choices[0].message
    assert final.tool_calls[0].function.arguments == call.function.arguments
    assert final.content == message.content
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "13"}]
    last = agent.chat.completions.create(model=MODEL, messages=messages, tools=[ADD], max_tokens=200)
    assert last.choices[0].message.content == "It is 13."
    assert last.choices[0].finish_reason == "stop"


SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"limit": NUMBER, "order": {"enum": ["newest", "oldest"]}},
            "required": ["limit", "order"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_the_embedded_model_calls_tools_where_it_must(server: Server, choice: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Find the newest 3."}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {
            "model": "headway-demo",
            "tools": [ADD, SEARCH],
            "max_tokens": 200,
            "temperature": 0,
        }
        body["model"] = client.models.list().data[0].id
        answer = client.chat.completions.create(
            messages=asked, tool_choice=choice, parallel_tool_calls=False, **body
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert (answer.choices[0].finish_reason, call.type) == ("tool_calls", "function")
        tool = {"add": ADD, "search": SEARCH}[call.function.name]  # type: ignore[union-attr]
        jsonschema.validate(json.loads(call.function.arguments), tool["function"]["parameters"])  # type: ignore[union-attr]
        assert choice == "required" or call.function.name == "search"  # type: ignore[union-attr]
        # The loop of an agent goes on with the result, in text.
        asked += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "a, b, c"}]
        text = client.chat.completions.with_raw_response.create(messages=asked, **{**body, "max_tokens": 8})
        assert text.headers["x-headway-ignored"] == "tools"
        assert not text.parse().choices[0].message.tool_calls
