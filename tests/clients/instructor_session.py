"""instructor's modes as its users have them; prints what came as JSON.

Arguments: the URLs of a server of the real model, and of one whose model says what the user's message tells
it to.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

ENFORCED = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)
OBJECT = '{"color": "red", "count": 3}'


class Item(BaseModel, extra="forbid"):
    """An item, whose text has a bound."""

    color: Literal["red", "green", "blue"]
    count: Annotated[int, Field(ge=0, le=99)]


def asked(url: str, mode: instructor.Mode, content: str) -> dict[str, Any]:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120), mode=mode
    )
    fields: dict[str, Any] = {
        "model": "demo-tools", "messages": [{"role": "user", "content": content}], "max_tokens": 200, "seed": 3,
        "max_retries": 1,
    }  # fmt: skip
    item = client.chat.completions.create(response_model=Item, **fields)
    *_, last = client.chat.completions.create_partial(response_model=Item, **fields)
    return {"item": item.model_dump(), "partial": last.model_dump()}


def main(url: str, scripted_url: str) -> None:
    told = {mode.name: asked(url, mode, "import os") for mode in ENFORCED}
    for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
        content = f"```json\n{OBJECT}\n```" if mode is instructor.Mode.MD_JSON else OBJECT
        told[mode.name] = asked(scripted_url, mode, content)
    print(json.dumps(told))


main(*sys.argv[1:])
