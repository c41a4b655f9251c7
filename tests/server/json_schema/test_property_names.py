"""What may be said of names by `propertyNames`, and zod's formats, which are names for the patterns beside
them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from headway_testing.grammars import fits

from headway.engine import RequestError, json_schema_source
from headway.server.json_schema import enforceable

NUMBER = {"type": "number"}
# As zod writes records, and pydantic dictionaries of literals.
SERVED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "any-name": ({"propertyNames": {"type": "string"}, "additionalProperties": NUMBER}, ['{"x":1}', "{}"], ['{"x":"y"}']),
    "true": ({"propertyNames": True}, ['{"x":1}'], ["[]"]),
    "empty": ({"propertyNames": {}, "additionalProperties": False}, ["{}"], ['{"x":1}']),
    "beside-properties": ({"propertyNames": {"type": "string"}, "properties": {"a": NUMBER}}, ['{"a":1}', '{"b":""}'], ['{"a":""}']),
    "listed": ({"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": NUMBER},
               ['{"a":1}', '{"a":1,"b":2}', "{}"], ['{"c":1}', '{"a":""}']),
    "listed-and-required": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER, "required": ["b"]}, ['{"b":1}'], ['{"a":1}', "{}"]),
    "constant": ({"propertyNames": {"const": "a"}}, ['{"a":[]}'], ['{"b":1}']),
    "pattern": ({"propertyNames": {"pattern": "^a"}, "additionalProperties": NUMBER}, ['{"a":1,"ab":2}'], ['{"b":1}', '{"a":""}']),
    "nested": ({"properties": {"r": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": NUMBER}}},
               ['{"r":{"x":1}}'], ['{"r":{"x":""}}']),
    "reference-to-the-values": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"anyOf": [NUMBER, {"type": "array", "items": {"$ref": "#/additionalProperties"}}]}},
                                ['{"a":[[1],2]}'], ['{"a":[""]}', '{"c":1}']),
    "format-of-zod": ({"properties": {"s": {"type": "string", "format": "starts_with", "pattern": "^ab.*"}}}, ['{"s":"abc"}'], ['{"s":"b"}']),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "others"), SERVED.values(), ids=SERVED)
def test_names_are_of_the_form_that_they_must_have(
    schema: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    found = json_schema_source(json.dumps(enforceable({"type": "object", **schema}, "guided_json")))
    assert [text for text in fitting + others if fits(found, text)] == fitting


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": False}, {"propertyNames": {"maxLength": 3}}, {"propertyNames": {"type": "integer"}}, {"propertyNames": 5},
        {"propertyNames": {"enum": ["a", 1]}}, {"propertyNames": {"enum": "a"}}, {"propertyNames": {"enum": ["a"], "maxLength": 3}},
        {"propertyNames": {"enum": [[]]}}, {"propertyNames": {"const": {}}},
        {"propertyNames": {"enum": ["a"]}, "properties": {"a": {}}}, {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_else_is_said_of_names_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="propertyNames at # "):
        enforceable({"type": "object", **schema}, "guided_json")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"propertyNames": {"pattern": []}}, "propertyNames"), ({"propertyNames": {"pattern": None}}, "propertyNames"),
        ({"propertyNames": {"pattern": "(?=a)"}}, "propertyNames"),
        ({"propertyNames": {"const": "\0"}}, "propertyNames"), ({"propertyNames": {"enum": ["a", "\0"]}}, "propertyNames.enum"),
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"not": {}}}, "additionalProperties.not"),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_is_left_out_is_told_by_the_names_of_the_request(schema: dict[str, Any], path: str) -> None:
    dropped: list[str] = []
    enforceable({"type": "object", **schema}, "guided_json", dropped)
    assert dropped == [f"guided_json.{path}"]
    with pytest.raises(RequestError, match=f"guided_json: .* at #/{path.split('.')[0]} "):
        enforceable({"type": "object", **schema}, "guided_json")


def test_a_format_of_zod_without_its_pattern_is_refused() -> None:
    with pytest.raises(RequestError, match="format at # is 'starts_with'"):
        enforceable({"type": "string", "format": "starts_with"}, "guided_json")
