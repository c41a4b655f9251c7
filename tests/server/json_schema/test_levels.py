"""Schemas of as many levels as the docs allow: the library itself reads fewer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from headway_testing.grammars import END, TABLE, fits

from headway.engine import make_grammar_check
from headway.server.grammar.frames import TextForm, ToolCalls
from headway.server.grammar.sources import checked_source
from headway.server.json_schema.enforceable import LIFTED_LEVELS, MAX_DEPTH

CHECK = make_grammar_check(TABLE, END + 1)
WRAPPERS = {
    "map": lambda schema: {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False},
    "list": lambda schema: {"anyOf": [schema, {"type": "null"}]},
    "one": lambda schema: {"type": "array", "items": schema, "minItems": 1},
    "all": lambda schema: {"allOf": [schema]},
}  # fmt: skip


def nested(levels: int, wrapper: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = WRAPPERS[wrapper](schema)
    return schema


def source_of(schema: Any, entry: str) -> str:
    if entry == "schema":
        return checked_source(TextForm("json_schema", json.dumps(schema), "guided_json"), CHECK)
    if entry == "lark":
        return checked_source(TextForm("lark", f"start: %json {json.dumps(schema)}", "guided_grammar"), CHECK)
    tools = [(0, {"type": "function", "function": {"name": "f", "parameters": schema}})]
    calls = ToolCalls(entry, tools, required=True, parallel=False)
    return checked_source(TextForm("tools", json.dumps(_plain(calls)), "tools"), CHECK)


def _plain(calls: ToolCalls) -> dict[str, Any]:
    return {name: getattr(calls, name) for name in ("output_format", "tools", "required", "parallel")}


@pytest.mark.parametrize("entry", ["schema", "lark", "hermes", "qwen_xml", "llama_json"])
@pytest.mark.parametrize("wrapper", ["map", "one"])
def test_every_entry_takes_as_many_levels_as_the_docs_say(entry: str, wrapper: str) -> None:
    schema = nested(MAX_DEPTH - (entry not in ("schema", "lark")), wrapper)
    if entry not in ("schema", "lark"):
        schema = {"type": "object", "properties": {"q": schema}}
    assert source_of(schema, entry)


@pytest.mark.parametrize("levels", [LIFTED_LEVELS - 1, LIFTED_LEVELS, 2 * LIFTED_LEVELS + 1, MAX_DEPTH])
@pytest.mark.parametrize(
    ("wrapper", "before", "after"),
    [("map", '{"a":', "}"), ("one", "[", "]"), ("list", "", ""), ("all", "", "")],
)
def test_deep_levels_hold(levels: int, wrapper: str, before: str, after: str) -> None:
    source = source_of({**nested(levels, wrapper), "$defs": {"mine": {"type": "string"}}}, "schema")
    assert fits(source, before * levels + "7" + after * levels)
    assert not fits(source, before * levels + '"7"' + after * levels)
