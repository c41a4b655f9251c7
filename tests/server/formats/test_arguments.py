"""Arguments of calls whose values are texts: how they are read by the schemas of a tool, whatever a client
wrote into those."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from headway.server.formats import Content, Piece, ToolCall, find_format

VALUES = (
    ("1e999", {}, "1e999"), ("9007199254740993", {"type": "integer"}, "9007199254740993"), ("1" * 5000, {"type": "integer"}, "1" * 5000),
    ("5.0", {"type": "integer"}, "5"), ("5.0", {"type": "number"}, "5.0"), ("1E+2", {"type": "number"}, "1E+2"),
    ('{"b": 1.50,\n "a": [true]}', {"type": "object"}, '{"b": 1.50,\n "a": [true]}'), ("{'a': None}", {}, '{"a": null}'),
    ("[true, None]", {}, "[true, null]"), ("\"\\ud800\"", {}, '"\\"\\\\ud800\\""'), ("'\\ud800'", {}, '"\'\\\\ud800\'"'), ("NaN", {}, '"NaN"'),
    ("'one' 'two'", {"type": ["string", "null"]}, '"\'one\' \'two\'"'), ('"one" "two"', {"type": ["string", "null"]}, '"\\"one\\" \\"two\\""'),
    ("5", {"type": ["string", "null"]}, '"5"'), ("5", {"type": "string"}, '"5"'), ("null", {"type": ["string", "null"]}, "null"),
    ("5", {"$ref": "#/$defs/text"}, '"5"'), ("5", {"anyOf": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/loop"}]}, '"5"'),
    ("5", {"$ref": "#/$defs/loop/anyOf/0"}, "5"), ("5", {"$ref": "#/$defs/either/anyOf/1"}, '"5"'),
)  # fmt: skip
DEFINITIONS = {
    "text": {"type": "string"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    "either": {"anyOf": [{"type": "null"}, {"type": "string"}]},
}


def parsed(parameters: Any, value: str, name: str = "qwen_xml") -> list[Piece]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = find_format(None, name=name).parser("", tools)
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    return [*parser.feed(text), *parser.finish()]


@pytest.mark.parametrize(("value", "schema", "told"), VALUES, ids=range(len(VALUES)))
def test_a_value_keeps_its_spelling_and_is_of_a_type_of_its_schema(
    value: str, schema: dict[str, Any], told: str
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": DEFINITIONS}
    assert parsed(parameters, value) == [ToolCall("f", f'{{"a": {told}}}')]


def test_parameters_are_those_of_the_definition_that_the_schema_refers_to() -> None:
    definition = {"type": "object", "properties": {"a": {"type": "string"}}}
    parameters = {"$ref": "#/definitions/f", "definitions": {"f": definition}}
    assert parsed(parameters, "5") == [ToolCall("f", '{"a": "5"}')]


# No grammar is made of these schemas where calls are not enforced, so that none was checked.
ODD_PARAMETERS: tuple[Any, ...] = (
    {"anyOf": 5}, {"anyOf": True}, {"oneOf": "abc"}, {"allOf": {"x": 1}}, {"type": 5}, {"type": [5]}, {"type": {"x": 1}}, {"enum": 5},
    {"enum": [[], {}, None, 1.5, True]}, {"$ref": 5}, {"$ref": "#/x/y"}, {"$ref": "http://x"}, {"$ref": "#/properties/a"}, {"$ref": f"#/anyOf/{'9' * 5000}", "anyOf": [{}]}, True, [], 5, None,
)  # fmt: skip


@pytest.mark.parametrize("schema", ODD_PARAMETERS, ids=json.dumps)
def test_no_schema_ends_a_request_by_its_form(schema: Any) -> None:
    assert parsed({"properties": {"a": schema}}, "5") == [ToolCall("f", '{"a": 5}')]
    assert parsed(schema if isinstance(schema, dict) else {"properties": schema}, "5") == [
        ToolCall("f", '{"a": 5}')
    ]


def test_references_take_time_by_their_number_alone() -> None:
    levels = 40
    definitions: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 50} for i in range(levels)
    }
    definitions |= {f"d{levels}": {"type": "string"}}
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(3000)} | {"c3000": {"type": "string"}}
    start = time.process_time()
    for name in ("d0", "c0"):
        parameters = {"properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": definitions | chain}
        assert parsed(parameters, "5") == [ToolCall("f", '{"a": "5"}')]
    assert time.process_time() - start < 1


PYTHON_CALLS: Sequence[tuple[str, list[tuple[str, str]]]] = (
    ('[get-time(from="a", class=1, None=null)]', [("get-time", '{"from": "a", "class": 1, "None": null}')]),
    ("[get-time(\ufb01x=[True, null, 'it\\'s'],)]", [("get-time", '{"\ufb01x": [true, null, "it\'s"]}')]),
    ("[ get-time( ), get-time ( a = (1, 2) ) , ]", [("get-time", "{}"), ("get-time", '{"a": [1, 2]}')]),
    ('[get-time(a="),](", b={"k": "="})]', [("get-time", '{"a": "),](", "b": {"k": "="}}')]),
    ("[get-time(1)]", []), ("[get-time(a=1)(b=2)]", []), ("[get-time(a=1) + 1]", []), ("[get-time(a=b)]", []), ("[get-time(**{})]", []),
    ("[get-time(a=1), other()]", []), ("[get-time]", []), ("[(get-time)()]", []), ("[,get-time()]", []), ('[get-time("a"=1)]', []),
)  # fmt: skip


@pytest.mark.parametrize(("text", "calls"), PYTHON_CALLS, ids=[text for text, _ in PYTHON_CALLS])
def test_calls_in_python_have_the_names_that_tools_may_have(text: str, calls: list[tuple[str, str]]) -> None:
    parser = find_format(None, name="pythonic").parser("", [{"function": {"name": "get-time"}}])
    pieces = [*parser.feed(text), *parser.finish()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == ("" if calls else text)
    assert [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)] == calls
