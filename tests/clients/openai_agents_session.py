"""openai-agents as its users have it: the default loop, over the Responses API, with one tool; prints what
came as JSON.

Argument: the URL of a server whose model says what the user's message tells it to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
TURN = "\n=====\n"
SCRIPT = f"<think>\nSix times seven.\n</think>\n\nI look it up.\n{CALL}{TURN}It is 42."


async def main(url: str) -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    called: list[tuple[int, int]] = []

    @function_tool
    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers."""
        called.append((a, b))
        return a * b

    agent = Agent(
        name="reckoner",
        instructions="Reckon.",
        model="demo-tools",
        tools=[multiply],
        model_settings=ModelSettings(max_tokens=400),
    )
    run = await Runner.run(agent, SCRIPT, max_turns=3)
    again = await Runner.run(agent, [*run.to_input_list(), {"role": "user", "content": "It is still 42."}])
    streaming = Runner.run_streamed(agent, SCRIPT, max_turns=3)
    deltas = [
        event.data.delta
        async for event in streaming.stream_events()
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
    ]
    kinds = [item.type for item in run.new_items]
    told: dict[str, Any] = {
        "output": run.final_output, "again": again.final_output, "streamed": streaming.final_output, "deltas": "".join(deltas),
        "called": called, "kinds": kinds, "usage": run.context_wrapper.usage.requests,
    }  # fmt: skip
    print(json.dumps(told))


asyncio.run(main(*sys.argv[1:]))
