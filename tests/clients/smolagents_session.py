"""smolagents' two kinds of agents as their users have them; prints what came as JSON.

Argument: the URL of a server whose model says what the user's message tells it to.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from typing import Any

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

TURN = "\n=====\n"


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the one
        b: the other
    """
    return a * b


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def told(url: str) -> dict[str, Any]:
    model = OpenAIModel(model_id="demo-tools", api_base=f"{url}/v1", api_key="none", max_tokens=400)
    options: dict[str, Any] = {"tools": [multiply], "model": model, "max_steps": 3, "verbosity_level": 0}
    calls = f"{call_of('multiply', a=6, b=7)}{TURN}{call_of('final_answer', answer='It is 42.')}"
    code = "Thought: I multiply.\n<code>\nfinal_answer(multiply(a=6, b=7))\n</code>"
    agent = ToolCallingAgent(**options)
    answer = agent.run(calls)
    results = [step.observations for step in agent.memory.steps if getattr(step, "observations", None)]
    streamed = ToolCallingAgent(stream_outputs=True, **options).run(calls)
    return {"calls": answer, "results": results, "streamed": streamed, "code": CodeAgent(**options).run(code)}


with redirect_stdout(sys.stderr):  # the agents draw what they do
    found = told(*sys.argv[1:])
print(json.dumps(found))
