"""huggingface_hub's InferenceClient as its users have it; prints what came as JSON.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "0"  # with 1 it refuses to ask this machine, too

from huggingface_hub import InferenceClient

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
FORM: Any = {"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA, "strict": True}}


def asked(client: InferenceClient, content: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return client.chat_completion(messages, model="demo-tools", max_tokens=200, **fields)


def main(url: str, scripted_url: str) -> None:
    client, scripted = (InferenceClient(base_url=f"{one}/v1", api_key="none") for one in (url, scripted_url))
    (call,) = asked(scripted, CALL, tools=[TOOL], tool_choice="auto").choices[0].message.tool_calls
    chunks = [chunk for chunk in asked(scripted, "Hello there.", stream=True) if chunk.choices]
    told = {
        "text": asked(scripted, "Hello there.").choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "call": [call.function.name, call.function.arguments],
        "by_schema": asked(client, "import os", response_format=FORM, seed=3).choices[0].message.content,
    }
    print(json.dumps(told))


main(*sys.argv[1:])
