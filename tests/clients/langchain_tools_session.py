"""LangChain's tools and structured output as its users have them; prints what came as JSON.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
OBJECT = '{"color": "red", "count": 3}'
TURN = "\n=====\n"


class Item(BaseModel, extra="forbid"):
    """An item, whose text has a bound."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


@tool
def pick(color: Literal["red", "green"]) -> str:
    """Picks a color."""
    return color


def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="demo-tools", max_retries=0, seed=3, max_tokens=200,
        stream_usage=True, timeout=120,
    )  # fmt: skip


def chosen_calls(model: ChatOpenAI) -> dict[str, Any]:
    """A tool that the model chooses, its result and the answer to it; the same as a stream."""
    with_tools = model.bind_tools([multiply, pick])
    question = HumanMessage(f"Let me see.\n{CALL}{TURN}It is 42.")
    answer = with_tools.invoke([question])
    results = [multiply.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results), results
    last = with_tools.invoke([question, answer, *results])
    chunks = list(with_tools.stream([question]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return {
        "calls": [{"name": call["name"], "args": call["args"]} for call in answer.tool_calls],
        "invalid": answer.invalid_tool_calls,
        "finish": answer.response_metadata["finish_reason"],
        "results": [result.content for result in results],
        "last": last.content,
        "streamed_calls": [{"name": call["name"], "args": call["args"]} for call in whole.tool_calls],
        "text": [answer.content, whole.content],
    }


def enforced(model: ChatOpenAI) -> dict[str, Any]:
    """What holds whatever the model says."""
    told: dict[str, Any] = {}
    for choice in ("any", "pick"):
        answer = model.bind_tools([multiply, pick], tool_choice=choice).invoke("import os")
        told[f"bind_{choice}"] = [call["name"] for call in answer.tool_calls]
    for method in ("json_schema", "function_calling"):
        structured = model.with_structured_output(Item, method=method)
        told[method] = structured.invoke("import os").model_dump()
        *_, last = structured.stream("import os")
        told[f"{method}_stream"] = last.model_dump()
    as_dict = model.with_structured_output(Item.model_json_schema(), method="json_schema", strict=True)
    told["dict"] = as_dict.invoke("import os")
    raw = model.with_structured_output(Item, method="json_schema", include_raw=True).invoke("import os")
    told["raw_error"] = raw["parsing_error"]
    return told


def main(url: str, scripted_url: str) -> None:
    told = {"chosen": chosen_calls(chat(scripted_url)), "enforced": enforced(chat(url))}
    json_mode = chat(scripted_url).with_structured_output(Item, method="json_mode")
    told["json_mode"] = json_mode.invoke(OBJECT).model_dump()
    print(json.dumps(told))


main(*sys.argv[1:])
