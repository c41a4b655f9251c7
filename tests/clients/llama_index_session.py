"""LlamaIndex's OpenAILike and its agent as their users have them; prints what came as JSON.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

TURN = "\n=====\n"
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


class Item(BaseModel, extra="forbid"):
    """An item, whose text has a bound."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def model_of(url: str, **more: Any) -> OpenAILike:
    return OpenAILike(
        model="demo-tools", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
        context_window=2048, max_tokens=200, max_retries=0, **more,
    )  # fmt: skip


async def agents_answer(url: str) -> str:
    agent = FunctionAgent(tools=[multiply], llm=model_of(url), streaming=True)
    return str(await agent.run(f"I look.\n{CALL}{TURN}It is 42."))


def main(url: str, scripted_url: str) -> None:
    scripted = model_of(scripted_url)
    hello = [ChatMessage(role="user", content="Hello there.")]
    told = {
        "complete": scripted.complete("Hello there.").text,
        "chat": scripted.chat(hello).message.content,
        "streamed": [part.delta for part in scripted.stream_chat(hello)],
        "agent": asyncio.run(agents_answer(scripted_url)),
        "object": model_of(url).structured_predict(Item, PromptTemplate("import os")).model_dump(),
        "by_schema": model_of(url, should_use_structured_outputs=True)
        .structured_predict(Item, PromptTemplate("import os"))
        .model_dump(),
    }
    print(json.dumps(told))


main(*sys.argv[1:])
