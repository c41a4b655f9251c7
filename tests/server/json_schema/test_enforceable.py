"""Ways round a schema that the library would leave open, and what is refused so that there are none."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from headway_testing.grammars import END, TABLE, fits

from headway.engine import RequestError, json_schema_source, make_grammar_check
from headway.server.grammar.frames import TextForm
from headway.server.grammar.sources import checked_source
from headway.server.json_schema import enforceable

CHECK = make_grammar_check(TABLE, END + 1)


def source(schema: object) -> str:
    return json_schema_source(json.dumps(enforceable(schema, "guided_json")))


def nested(depth: int, inner: Any) -> Any:
    return {"type": "array", "items": nested(depth - 1, inner)} if depth else inner


NUMBER = {"type": "integer"}
WAYS_ROUND: dict[str, tuple[Any, list[str], list[str]]] = {
    "listed-name": ({"properties": {"foo": NUMBER}}, ['{"foo":1}', '{"fo":""}'], [r'{"\u0066oo":"x"}', r'{"f\u006Fo":"x"}', '{"foo":"x"}']),
    "required-name": ({"required": ["foo"], "properties": {}}, ['{"foo":1}'], [r'{"foo":1,"\u0066oo":2}', '{"foo":1,"foo":2}']),
    "matched-name": ({"patternProperties": {"^f.*o$": NUMBER}}, ['{"fo":1}'], [r'{"f\u00ffo":"x"}', r'{"\u0066o":"x"}', '{"fo":"x"}']),
    "quoted-name": ({"properties": {'a"\\b\n': NUMBER}}, [r'{"a\"\\b\n":1}'], [r'{"a\u0022\\b\n":"x"}', r'{"a\"\\b\u000a":"x"}', r'{"a\"\\b\n":"x"}']),
    "names-that-come-twice": ({"type": "object", "minProperties": 1}, ['{"a":1}', '{"a":1,"a":2}'], ["{}"]),
    "endless-space": ({"type": "array"}, ["[1, 2]", "[\n    1,\n    2\n]"], ["[  1]", "[\n\n1]", " [1]", "[1] "]),
    "anything": (True, ["1", "null", '{"a":[]}'], ["", "a"]),
    "no-more-than-it-says": ({"title": "a", "default": 5, "x-mine": {"not": {}}, "maxLength": 2.0, "uniqueItems": False}, ['"ab"', "[1,1]"], ['"abc"']),
    "hidden-in-a-definition": ({"$defs": {"a/b": {"maximum": 5}}, "$ref": "#/$defs/a~1b"}, ["5"], ["6"]),
    "one-of-by-a-name": ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in "ab"}}, ['{"kind":"a"}', '{"kind":"b"}'], ['{"kind":"c"}', "{}"]),
    "one-of-beside-any-of": ({"anyOf": [{"minimum": 3}, {"type": "string"}], "oneOf": [{"type": "number"}, {"type": "null"}]}, ["4", "null"], ["2", '"a"']),
    "one-of-before-any-of": ({"oneOf": [{"type": "number"}, {"type": "null"}], "anyOf": [{"minimum": 3}, {"type": "string"}]}, ["4", "null"], ["2", '"a"']),
    "above-zero": ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1", "0.001"], ["0", "0.0", "-0", "0.6"]),
    "below-zero": ({"minimum": -0.95, "exclusiveMaximum": 0}, ["-0.95", "-0.9", "-0.001"], ["0", "-0", "-0.0", "-0.96"]),
    "above-one": ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.01"], ["1", "1.0", "1.6"]),
    "above-a-large-number": ({"type": "number", "exclusiveMinimum": 10**15, "maximum": 10**15 + 2}, ["1000000000000001", "1000000000000001.5"], ["1000000000000000", "1000000000000000.0"]),
    "above-the-largest": ({"type": "number", "exclusiveMinimum": 2**53}, ["9007199254740994"], ["9007199254740992"]),
    "below-minus-two": ({"type": "number", "exclusiveMaximum": -2, "minimum": -2.5}, ["-2.01", "-2.5"], ["-2", "-2.0", "-2.6"]),
    "excluded-elsewhere": ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.25}], "type": "number"}, ["0.25", "0.2", "0.05"], ["0", "0.3"]),
    "cut-short": ({"minimum": 0, "maximum": 0.95}, ["0.9", "0.95", "0.90", "0"], ["0.96", "1"]),
    "cut-shorter": ({"maximum": 22.168}, ["22.16", "22.1", "22", "22.168"], ["22.17", "22.2"]),
    "cut-before-what-is-excluded": ({"exclusiveMaximum": 1.25}, ["1.2", "1.24"], ["1.25", "1.250"]),
    "cut-of-a-least-number": ({"minimum": -100.05, "maximum": -99.5}, ["-100.0", "-100", "-100.05", "-99.5"], ["-100.1", "-99.4"]),
    "fewer-decimals-than-a-divisor": ({"multipleOf": 0.25, "minimum": 0}, ["0.5", "0.50", "0.25", "3"], ["0.2", "0.1"]),
    "no-quotes": ({"type": "string", "pattern": '^[^"]*$'}, ['"a\\\\b"', '"\\n"'], ['"a\\"b"']),
    "no-backslashes": ({"type": "string", "pattern": r"^[^\\]*$"}, ['"a\\"b"', '"\\n"'], ['"a\\\\b"']),
    "no-printable-characters": ({"type": "string", "pattern": "^[^ -~]$"}, ['"é"', '"\\n"'], ['"\\""', '"\\\\"', '"a"', '"\x7f"']),
    "no-quotes-and-few-characters": ({"type": "string", "pattern": r'^[\d\s,]*[^"\\]$', "maxLength": 2}, ['"1a"', '"\\t"'], ['"1\\""', '"123"']),
    "names-without-quotes": ({"patternProperties": {'^[^"]*$': {}}, "additionalProperties": False}, ['{"a":1}'], ['{"\\"":1}']),
    "name-of-a-definition": ({"$defs": {"My Model[int]": {"type": "integer"}}, "$ref": "#/$defs/My Model[int]"}, ["1"], ['"a"']),
    "odd-name-of-a-definition": ({"$defs": {'100% "é"|<a/b>': {"type": "integer"}}, "$ref": '#/$defs/100% "é"|<a~1b>'}, ["1"], ['"a"']),
    "reference-into-one-of": ({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}, "b": {"$ref": "#/properties/a/oneOf/0"}}}, ['{"b":1}'], ['{"b":null}']),
    "one-of-by-references-into-a-list": ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "b": {"oneOf": [{"$ref": "#/properties/a/anyOf/0"}, {"$ref": "#/properties/a/anyOf/1"}]}}}, ['{"b":1}', '{"b":null}'], ['{"b":"c"}']),
    "reference-to-a-pattern": ({"patternProperties": {r"^\d$": {"type": "integer"}}, "properties": {"b": {"$ref": "#/patternProperties/^\\d$"}}}, ['{"b":1}'], ['{"b":"c"}']),
    "reference-deep-down": ({"properties": {"a": nested(40, NUMBER), "b": {"$ref": f"#/properties/a{'/items' * 39}"}}}, ['{"b":[1]}'], ['{"b":[[1]]}', '{"b":1}']),
    "int32": ({"type": "number", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "1.5"]),
    "uint8-beside-texts": ({"type": ["integer", "string"], "format": "uint8"}, ["255", '"a"'], ["256", "-1"]),
    "int64": ({"type": "integer", "format": "int64"}, ["9223372036854774784"], ["9223372036854775808", "1.5"]),
    "double": ({"type": "number", "format": "double"}, ["1.5"], ['"a"']),
    "date": ({"format": "date"}, ['"2024-02-29"', "1"], ['"2023-02-29"', '"1900-02-29"', '"2024-13-01"']),
    "email": ({"format": "email"}, ['"a.b@example.com"'], [f'"{"a" * 65}@b.de"', f'"a@{"b" * 64}.de"', '"a"']),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "others"), WAYS_ROUND.values(), ids=WAYS_ROUND)
def test_there_is_no_way_round_a_schema(schema: Any, fitting: list[str], others: list[str]) -> None:
    found = source(schema)
    assert [text for text in fitting + others if fits(found, text)] == fitting


LEFT_OUT: dict[str, tuple[Any, list[str], list[str]]] = {
    "patterns-of-the-rest": ({"patternProperties": {"(?=a)": NUMBER}, "additionalProperties": False}, ['{"a":1}'], ["patternProperties", "additionalProperties"]),
    "two-patterns": ({"patternProperties": {"^a": NUMBER, "b$": NUMBER}, "additionalProperties": {"type": "null"}}, ['{"a":1}'], ["patternProperties", "additionalProperties"]),
    "ill-formed-properties": ({"properties": [], "additionalProperties": False}, ['{"a":1}'], ["properties", "additionalProperties"]),
    "items-of-another-draft": ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [NUMBER], "items": False}, ["[1]"], ["prefixItems", "items"]),
    "anchor-within": ({"properties": {"a": {"pattern": "b^c"}, "d": {"pattern": "^e$"}}}, ['{"a":"","d":"e"}'], ["properties.a.pattern"]),
    "slashes-around-a-pattern": ({"pattern": "/^a$/"}, ['"a"'], ["pattern"]),
    "unknown-property-of-characters": ({"patternProperties": {r"\p{Nothing}": NUMBER}}, ['{"a":null}'], ["patternProperties"]),
    "open-group": ({"pattern": "((a)"}, ['"a"'], ["pattern"]),
    "reference-into-what-is-left-out": ({"properties": {"a": {"not": NUMBER}, "b": {"$ref": "#/properties/a/not"}}}, ['{"b":""}'], ["properties.a.not", "properties.b.$ref"]),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "paths"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_is_left_out_shuts_nothing_out_and_is_refused_by_place_where_strict(
    schema: Any, fitting: list[str], paths: list[str]
) -> None:
    text = json.dumps(schema)
    found = checked_source(TextForm("json_schema", text, "guided_json"), CHECK, None, dropped := list[str]())
    assert (dropped, [one for one in fitting if fits(found, one)]) == (
        [f"guided_json.{path}" for path in paths],
        fitting,
    )
    with pytest.raises(RequestError) as caught:
        checked_source(TextForm("json_schema", text, "guided_json", strict=True), CHECK)
    assert paths[0].rpartition(".")[2] in str(caught.value)
    assert "See /docs/api.md" in str(caught.value)


def mirrored(count: int) -> object:
    """Two objects whose properties all lead back to their own kind."""
    names = [f"p{i}" for i in range(count)]
    kinds = {
        kind: {"required": names, "type": "object", "properties": {name: {"$ref": f"#/$defs/{kind}"} for name in names}}
        for kind in "ab"
    }  # fmt: skip
    return {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": kinds}


MAX_SECONDS = 2.0  # several times what it takes
SLOW: dict[str, object] = {
    "circles": mirrored(40), "circle": mirrored(4),
    "values": {"oneOf": [{"enum": list(range(8000 * i, 8000 * i + 8000))} for i in range(3)]},
    "members": {"items": [{"oneOf": [{"const": i} for i in range(64)]} for _ in range(70)]},
    "members-of-values": {"oneOf": [{"enum": list(range(700 * i, 700 * i + 700))} for i in range(64)]},
}  # fmt: skip


@pytest.mark.parametrize("schema", SLOW.values(), ids=SLOW)
def test_a_one_of_is_looked_at_for_a_bounded_time(schema: object) -> None:
    """The event loop of the API process does it for tools."""
    start = time.process_time()
    enforceable(schema, "tools")
    assert time.process_time() - start < MAX_SECONDS


REFUSED: dict[str, tuple[Any, str]] = {
    "false": (False, "the schema at # is false"),
    "no-schema": ([], "the schema at # must be an object, true or false"),
    "options": ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance at #"),
    "nested-options": ({"items": {"x-guidance": {}}}, "x-guidance at #/items"),
    "unknown": ({"items": [{"requird": ["a"]}]}, "'requird' at #/items/0 is no keyword that is known; did you mean required?"),
    "own-name": ({"vendor_zzz": 1}, "a name of your own must begin with x-"),
    "draft-4": ({"$schema": "http://json-schema.org/draft-04/schema#"}, "$schema at #"),
    "boolean-bound": ({"minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum at # is true, it must be a number"),
    "inexact": ({"const": 2**53 + 1}, "const at # has 9007199254740993; numbers are enforced exactly up to"),
    "inexact-member": ({"enum": [1, {"a": [1e300]}]}, "enum at # has 1e+300"),
    "many-digits": ({"const": 0.9751989661364331}, "const at # has 0.9751989661364331; numbers are enforced exactly up to 9007199254740992 and of up to 15 digits"),
    "bound-of-many-digits": ({"minimum": 0.23175303594635366}, "minimum at # has"),
    "divisor": ({"multipleOf": 12345}, "at most 4 digits"),
    "negative-divisor": ({"multipleOf": -1}, "a number above 0"),
    "count": ({"maxLength": 1.5}, "maxLength at # is 1.5, it must be a whole number"),
    "null": ({"type": None}, "type at # is null, it must be one of array,"),
    "types": ({"type": ["string", "text"]}, "type at #"),
    "no-values": ({"enum": []}, "enum at #"),
    "names": ({"required": "a"}, "required at #"),
    "no-members": ({"allOf": []}, "allOf at #/allOf must be a list of one schema or more"),
    "format": ({"format": "iri"}, "format at # is 'iri', it must be one of date,"),
    "great-number": ({"minimum": 10**400}, f"minimum at # is 1{'0' * 63}..., it must be a number"),
    "format-object": ({"format": {}}, "format at # is {}, it must be one of date,"),
    "format-list-beside-a-pattern": ({"format": ["date"], "pattern": "a"}, 'format at # is ["date"], it must be one of date,'),
    "pattern": ({"properties": {"a": {"pattern": "(?=a)"}}}, "the pattern at #/properties/a has look-around"),
    "name-pattern": ({"patternProperties": {"(?i)a": {}}}, "has flags"),
    "reference-outside": ({"$ref": "https://example.com/a"}, "$ref at # is 'https://example.com/a', it must be a path within this schema"),
    "reference-to-nothing": ({"$ref": "#/$defs/a"}, "$ref at # is '#/$defs/a', where this schema has no schema"),
    "reference-beyond-a-list": ({"anyOf": [{"type": "null"}, {"$ref": f"#/anyOf/{'9' * 5000}"}]}, "where this schema has no schema"),
    "reference-to-a-value": ({"const": {"not": {}}, "$ref": "#/const"}, "where this schema has no schema"),
    "inner-id": ({"$defs": {"a": {"$id": "b"}}}, "$id at #/$defs/a"),
    "void": ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#", "maximum": 3}}}, "maximum at #/properties/a stands beside $ref"),
    "other-draft": ({"$schema": "http://json-schema.org/draft-07/schema", "prefixItems": [{}]}, "prefixItems at #"),
    "idle": ({"additionalItems": False}, "additionalItems at # does nothing"),
    "repeated-names": ({"type": "object", "minProperties": 2}, "minProperties at # is 2, it can be enforced up to 1"),
    "control-character": ({"enum": ["a\x01"]}, "enum at # has 'a\\x01'"),
    "delete-character": ({"enum": ["a\x7fb", "c"]}, "enum at # has 'a\\x7fb' with a control character"),
    "delete-character-in-a-name": ({"required": ["a\x7f"]}, "required at # has"),
    "delete-character-in-a-pattern": ({"pattern": "\x7f"}, "the pattern at # has the control character 127"),
    "control-character-in-a-name": ({"properties": {"a\x7f\x00": {}}}, "properties at #/properties has"),
    "deep": (json.loads('{"items":' * 80 + "{}" + "}" * 80), "is nested 65 deep, the limit is 64"),
    "many": ({"anyOf": [{}] * 6000}, "more than 5000 schemas"),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "complaint"), REFUSED.values(), ids=REFUSED)
def test_a_schema_is_refused_by_keyword_and_place(schema: Any, complaint: str) -> None:
    with pytest.raises(RequestError) as caught:
        enforceable(schema, "guided_json")
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("guided_json: ")
    assert (caught.value.param, caught.value.code) == ("guided_json", "invalid_grammar")
