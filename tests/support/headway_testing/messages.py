"""Answers of Anthropic's Messages API, assembled as its clients do, and a chat for tests of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx

from headway.server.app import create_app
from headway.server.requests.services import Services

URL = "/v1/messages"
COUNT = f"{URL}/count_tokens"
HELLO = {"role": "user", "content": "hello"}


def asked(**body: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 200, "messages": [HELLO], **body}


def connect(services: Services, **changes: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(replace(services, **changes)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://headway")


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream. Each has its type in its name and in its data."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data, *others = event.splitlines()
        assert not others
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client assembles from a stream's events, whose order is checked."""
    start, *between, delta, stop = events
    assert (start["type"], delta["type"], stop) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    for event in between:
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            block = event["content_block"]
            message["content"].append(block)
            arguments = ""
        elif event["type"] == "content_block_delta":
            assert is_open
            told = event["delta"]
            if told["type"] == "input_json_delta":
                arguments += told["partial_json"]
                block["input"] = json.loads(arguments)
            else:
                name = told["type"].removesuffix("_delta")
                assert set(told) == {"type", name}
                assert "signature" not in block or not block["signature"], "the signature comes last"
                block[name] += told[name]
        else:
            assert event["type"] == "content_block_stop"
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message without what is drawn for each answer."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": blocks}
