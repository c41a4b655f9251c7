"""An MCP server over standard input and output with one tool, `add`; the standard library is all that it
needs."""

from __future__ import annotations

import json
import sys
from typing import Any

INTEGERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "name": "add",
    "description": "Adds two integers.",
    "inputSchema": {"type": "object", "properties": INTEGERS, "required": ["a", "b"]},
}


def result_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"name": "demo", "version": "1"}
        return {
            "protocolVersion": given["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    if method == "tools/list":
        return {"tools": [ADD]}
    if method == "tools/call":
        numbers = given["arguments"]
        return {"content": [{"type": "text", "text": str(numbers["a"] + numbers["b"])}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = result_of(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
