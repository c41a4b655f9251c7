"""Tools whose schemas a model's form of calls cannot enforce: told and left out, or refused where the tool is
strict."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from headway_testing.grammars import END, TABLE, fits

from headway.engine import RequestError, make_grammar_check
from headway.server.grammar.frames import TextForm, ToolCalls
from headway.server.grammar.sources import checked_source

CHECK = make_grammar_check(TABLE, END + 1)
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
PATH = "tools[3].function.parameters"


def source(parameters: dict[str, Any], output_format: str, dropped: list[str], **function: Any) -> str:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}
    calls = ToolCalls(output_format, [(3, tool)], required=True, parallel=False)
    form = TextForm("tools", msgspec.json.encode(calls).decode(), "tools")
    return checked_source(form, CHECK, None, dropped)


TEXT = {"type": "string"}
UNWRITTEN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "format": ("qwen_xml", {"properties": {"a": {**TEXT, "format": "hostname"}}}, ["properties.a.format"]),
    "format-in-a-union": ("qwen_xml", {"properties": {"a": {"anyOf": [{**TEXT, "format": "hostname"}, {**TEXT, "maxLength": 9}]}}}, ["properties.a.format"]),
    "constant-with-a-tag": ("qwen_xml", {"properties": {"a": {"enum": ["</parameter>", "x"]}}}, ["properties.a.enum"]),
    "relation": ("qwen_xml", {"properties": {"a": TEXT}, "anyOf": [{"required": ["a"]}]}, ["anyOf"]),
    "name": ("pythonic", {"properties": {"x-y": TEXT}, "required": ["x-y"]}, ["properties.x-y"]),
    "patterns": ("hermes", {"patternProperties": {"^a": True, "b$": {}}}, ["patternProperties"]),
}  # fmt: skip


@pytest.mark.parametrize(("output_format", "parameters", "paths"), UNWRITTEN.values(), ids=UNWRITTEN)
def test_what_a_form_of_calls_cannot_enforce_is_left_out_unless_the_tool_is_strict(
    output_format: str, parameters: dict[str, Any], paths: list[str]
) -> None:
    source({"type": "object", **parameters}, output_format, dropped := list[str]())
    assert dropped == [f"{PATH}.{path}" for path in paths]
    with pytest.raises(RequestError) as caught:
        source({"type": "object", **parameters}, output_format, [], strict=True)
    assert caught.value.param == PATH
    assert paths[0].rpartition(".")[2] in str(caught.value)
    # The remedy is to leave it out.
    source({"type": "object", "properties": {"a": TEXT}}, output_format, [], strict=True)


def test_a_format_and_a_pattern_of_a_text_hold_together() -> None:
    both = {**TEXT, "format": "date", "pattern": "^2026", "maxLength": 10}
    found = source({"properties": {"a": both}, "required": ["a"]}, "qwen_xml", dropped := list[str]())
    assert dropped == []
    texts = ["2026-01-31", "2025-01-31", "2026-13-31", "2026"]
    assert [text for text in texts if fits(found, CALL.format(text))] == ["2026-01-31"]


OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "parameter": ({"properties": {"o": {**TEXT, "maxLength": 2}, "a": {"$ref": "#/properties/o"}}}, ["ab"]),
    "itself": ({"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}}}, ["[[]]"]),
    "root": ({"properties": {"a": {"$ref": "#"}, "o": {"type": "integer"}}, "additionalProperties": False}, ['{"o": 1}', '{"a": {}}']),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "fitting"), OTHERS.values(), ids=OTHERS)
def test_a_parameter_may_be_what_stands_elsewhere_in_the_schema(
    parameters: dict[str, Any], fitting: list[str]
) -> None:
    found = source({"type": "object", **parameters}, "qwen_xml", dropped := list[str]())
    assert dropped == []
    texts = ["ab", "abc", "[[]]", "[1]", '{"o": 1}', '{"a": {}}', '{"o": []}']
    assert [text for text in texts if fits(found, CALL.format(text))] == fitting


def test_a_text_is_of_a_definition_with_blanks_in_its_name() -> None:
    schema = {"$defs": {"My Text": {**TEXT, "maxLength": 3}}, "properties": {"a": {"$ref": "#/$defs/My Text"}}, "required": ["a"]}  # fmt: skip
    found = source(schema, "qwen_xml", [])
    assert [text for text in ("ab c", "abc") if fits(found, CALL.format(text))] == ["abc"]
