"""Streams of /v1/responses, as clients read them."""

from __future__ import annotations

import json
import re
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def events_of(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream. Each is of OpenAI's types, named and numbered."""
    *written, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in written:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        EVENTS.validate_python(events[-1], strict=True)
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def told(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns items without their ids, whose form is checked."""
    found: list[tuple[str, ...]] = []
    prefixes = {"reasoning": "rs", "message": "msg"}
    for item in items:
        assert re.fullmatch(prefixes.get(item["type"], "fc") + "_[0-9a-f]{24}", item["id"])
        if "call_id" in item:
            assert re.fullmatch("call_[0-9a-f]{24}", item["call_id"])
            words = [item[name] for name in ("namespace", "name", "arguments", "input") if name in item]
            found.append((item["type"], *words))
        else:
            (part,) = item["content"]
            found.append((item["type"], part["text"]))
    return found


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items that a client makes of the deltas; checks that repeated values are the same."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                items.append({**event["item"]})
            case "reasoning_summary_part.added":
                assert event["part"]["text"] == ""
                items[-1]["summary"] = [{**event["part"]}]
            case "reasoning_summary_text.delta":
                items[-1]["summary"][0]["text"] += event["delta"]
            case "reasoning_summary_text.done":
                assert event["text"] == items[-1]["summary"][0]["text"]
            case "reasoning_summary_part.done":
                assert event["part"] == items[-1]["summary"][0]
            case "custom_tool_call_input.delta":
                items[-1]["input"] += event["delta"]
            case "custom_tool_call_input.done":
                assert event["input"] == items[-1]["input"]
            case "content_part.added":
                assert event["part"]["text"] == ""
                items[-1]["content"] = [{**event["part"]}]
            case "output_text.delta" | "reasoning_text.delta":
                items[-1]["content"][0]["text"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[-1]["content"][0]["text"]
            case "content_part.done":
                assert event["part"]["text"] == items[-1]["content"][0]["text"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "function_call_arguments.done":
                assert event["arguments"] == items[-1]["arguments"]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                if items[-1]["type"] == "reasoning":  # what is only told once it is complete
                    items[-1]["encrypted_content"] = event["item"]["encrypted_content"]
                assert event["item"] == items[-1]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
    return items
