"""pydantic-ai's agents as its users have them; prints what came as JSON.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
OBJECT = '{"color": "red", "count": 3}'
TURN = "\n=====\n"


class Item(BaseModel, extra="forbid"):
    """An item, whose text has a bound."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


def model_of(url: str) -> OpenAIChatModel:
    return OpenAIChatModel("demo-tools", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


async def chosen_calls(url: str) -> dict[str, Any]:
    agent = Agent(model_of(url))
    called: list[tuple[int, int]] = []

    @agent.tool_plain
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        called.append((a, b))
        return a * b

    script = f"<think>\nSix times seven.\n</think>\n\n{CALL}{TURN}It is 42."
    run = await agent.run(script)
    again = await agent.run("It is still 42.", message_history=run.all_messages())
    async with agent.run_stream(script) as stream:
        streamed = await stream.get_output()
    thinking = [p.content for m in run.all_messages() for p in m.parts if p.part_kind == "thinking"]
    return {
        "output": run.output, "again": again.output, "streamed": streamed, "called": called, "thinking": thinking,
    }  # fmt: skip


async def structured(url: str, output: Any, content: str) -> dict[str, Any]:
    settings = ModelSettings(max_tokens=200, seed=3)
    agent = Agent(model_of(url), output_type=output, retries=0, model_settings=settings)
    run = await agent.run(content)
    async with agent.run_stream(content) as stream:
        streamed = await stream.get_output()
    return {"output": run.output.model_dump(), "streamed": streamed.model_dump()}


async def main(url: str, scripted_url: str) -> None:
    told = {
        "chosen": await chosen_calls(scripted_url),
        "tool": await structured(url, ToolOutput(Item), "import os"),
        "native": await structured(url, NativeOutput(Item), "import os"),
        "prompted": await structured(scripted_url, PromptedOutput(Item), OBJECT),
    }
    print(json.dumps(told))


asyncio.run(main(*sys.argv[1:]))
