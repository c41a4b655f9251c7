"""outlines' generators before this server, as a vLLM server and as OpenAI's; prints what came as JSON.

Argument: the URL of a server of the real model.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Annotated, Any, Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field


class Item(BaseModel, extra="forbid"):
    """An item, whose text has a bound."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


TYPES: dict[str, Any] = {
    "literal": Literal["alpha", "beta"], "regex": Regex("[0-9]{3}-[0-9]{4}"), "date": datetime.date, "integer": int,
    "boolean": bool, "object": Item, "grammar": CFG('start: "yes" | "no"'),
}  # fmt: skip


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    vllm = outlines.from_vllm(client, "demo-tools")
    told = {name: vllm("import os", kind, max_tokens=200, seed=3) for name, kind in TYPES.items()}
    told["streamed"] = "".join(vllm.stream("import os", Item, max_tokens=200, seed=3))
    told["choices"] = vllm("import os", Item, max_tokens=200, n=2, seed=3)
    told["openai"] = outlines.from_openai(client, "demo-tools")("import os", Item, max_tokens=200)
    print(json.dumps(told))


main(*sys.argv[1:])
