"""Forms of grammars that are deep, huge or exponential, by name."""

from __future__ import annotations

import json

from headway.server.grammar.frames import TextForm

NUM_CHARACTERS = 200_000


def schema(value: object) -> TextForm:
    return TextForm("json_schema", json.dumps(value), "guided_json")


def lark(value: str) -> TextForm:
    return TextForm("lark", value, "guided_grammar")


def regex(value: str) -> TextForm:
    return TextForm("regex", value, "guided_regex")


def nested(depth: int) -> object:
    inner: object = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return inner


def doubled(depth: int) -> object:
    inner: object = {"type": "string"}
    for _ in range(depth):
        inner = {"anyOf": [inner, inner]}
    return inner


def objects(count: int) -> list[object]:
    """Returns members of a oneOf that only their last property distinguishes."""
    names = [f"k{i}" for i in range(8)]
    return [
        {"type": "object", "required": names, "properties": {name: {"enum": list(range(200 * i, 200 * i + 200))} for name in names}}
        for i in range(count)
    ]  # fmt: skip


PIECES = [
    [{"type": "object", "required": [f"p{i}{j}"], "properties": {f"p{i}{j}": {}}} for j in range(4)]
    for i in range(10)
]
HOSTILE = {
    "deep": TextForm("json_schema", '{"items":' * 25_000 + "{}" + "}" * 25_000, "guided_json"), "deep-value": schema({"const": json.loads("[" * 400 + "]" * 400)}),
    "deep-but-served": schema(nested(60)), "doubled": schema(doubled(11)), "product": schema({"allOf": [{"anyOf": piece} for piece in PIECES]}),
    "many-values": schema({"enum": [f"value number {i}" for i in range(12_000)]}), "long-value": schema({"const": "x" * NUM_CHARACTERS}),
    "many-properties": schema({"properties": {f"property_{i}": {"type": "string"} for i in range(4_000)}}),
    "many-required": schema({"required": [f"name_{i}" for i in range(8_000)]}),
    "long-text": schema({"type": "string", "minLength": 10**6}), "many-items": schema({"type": "array", "minItems": 10**12}),
    "alternation": schema({"pattern": "^(a|b|ab){1,5000}$"}), "powers": schema({"pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"}),
    "dots": schema({"pattern": "(.*a){50}"}), "tail": schema({"pattern": "^.*a.{200}$"}),
    "conjunction": schema({"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{20 + i}}}x"} for i in range(12)]}),
    "formats": schema({"properties": {f"e{i}": {"type": "string", "format": "email"} for i in range(500)}}),
    "divisors": schema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (101, 103, 107, 109)]}),
    "names": schema({"patternProperties": {f"^a{i}[a-z]*$": {} for i in range(300)}}), "one-of": schema({"oneOf": objects(8)}),
    "tree": schema({"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)} | {"d30": {}}, "$ref": "#/$defs/d0"}),
    "circle": schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "regex": regex("(a|b|ab){1,5000}"), "regex-stars": regex("(((a*)*)*)*b" * 50), "regex-groups": regex("(" * 4000 + ")" * 4000), "regex-letters": regex(r"\w{1,2000}"),
    "rules": lark("start: r0\n" + "\n".join(f'r{i}: "x{i}" r{(i + 1) % 5000}?' for i in range(5000))),
    "terminals": lark("start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'),
    "ambiguous": lark('start: a\na: a a | "x" | '), "groups": lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "repetition": lark('start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"'), "complement": lark("start: A\nA: ~/(.|\\n)*(a|b){50}(.|\\n)*/ & /(.|\\n)*x(.|\\n){100}/"),
}  # fmt: skip
