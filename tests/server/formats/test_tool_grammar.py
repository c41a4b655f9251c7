"""Grammars of calls: random walks over their masks give texts that the format's parser takes for exactly the
calls they were made for."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jsonschema
import llguidance.numpy
import numpy
import pytest

from headway.engine import RequestError, TokenTable, compile_matcher, lark_source, make_tokenizer
from headway.server.formats import FORMATS, Content, OutputFormat, Piece, Reasoning, ToolCall, find_format

CALLING = [one for one in FORMATS if one.calls or one.is_harmony]
CASES = [
    pytest.param(one, special, id=f"{one.name}-{'special' if special else 'plain'}")
    for one in CALLING
    for special in ((True,) if one.is_harmony else (True, False))
]
# After so many walks a test may end where it has met all that it must meet.
LEAST = pytest.mark.parametrize("least", [6, pytest.param(100, marks=pytest.mark.long)], ids=["some", "all"])
NAMES = {"type": "string", "maxLength": 8}
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": NAMES,
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "exact": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "move": {
        "type": "object",
        "properties": {
            "to": {"$ref": "#/$defs/point"},
            "via": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
            "note": {"type": ["string", "null"]},
            "code": {"type": "string", "pattern": "^[A-Z]{2,4}$"},
        },
        "required": ["to", "code"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number", "minimum": -9, "maximum": 9}, "name": NAMES},
                "required": ["x", "name"],
                "additionalProperties": False,
            }
        },
    },
    "now": None,
    "all_optional": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 9},
            "b": NAMES,
            "c": {"type": "null"},
        },
        "additionalProperties": False,
    },
}


def tools(*names: str) -> list[dict[str, Any]]:
    functions = [{"name": name, **({"parameters": TOOLS[name]} if TOOLS[name] else {})} for name in names]
    return [{"type": "function", "function": function} for function in functions]


class Vocabulary:
    """Every byte, the special tokens, the tags of the format as tokens of several characters, and an end
    token."""

    def __init__(self, special: Sequence[str], tags: Sequence[str]) -> None:
        texts = [*special, *tags]
        self.tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in texts] + [b"<eos>"]
        self.special_ids = {text: 256 + i for i, text in enumerate(special)}
        self.end = len(self.tokens) - 1
        table = TokenTable(self.tokens, [*self.special_ids.values(), self.end], [self.end])
        self.tokenizer = make_tokenizer(table, len(self.tokens))

    def walks(self, grammar: str, seed: int, count: int, prefer: float) -> Iterator[str]:
        """Texts of the grammar, each drawn from the masks. prefer: how much likelier what closes something is
        than other bytes."""
        start = compile_matcher(self.tokenizer, lark_source(grammar))
        bits = llguidance.numpy.allocate_token_bitmask(1, len(self.tokens))
        rng = random.Random(seed)
        weights = [prefer if i >= 256 or i in b'"}]\n' else 1.0 for i in range(len(self.tokens))]
        for _ in range(count):
            matcher, text = start.deep_copy(), b""
            for _ in range(3000):
                llguidance.numpy.fill_next_token_bitmask(matcher, bits)
                allowed = numpy.unpackbits(bits.view(numpy.uint8), bitorder="little").nonzero()[0].tolist()
                assert allowed, (matcher.get_error(), text)
                token = rng.choices(allowed, [weights[i] for i in allowed])[0]
                if token == self.end:
                    break
                assert matcher.consume_token(token)
                text += self.tokens[token]
            else:
                raise AssertionError(f"no end: {text[:500]!r}")
            yield text.decode()


def openers_of(one: OutputFormat) -> tuple[str, ...]:
    """What text may come before."""
    if one.is_harmony:
        return ("<|channel|>final<|message|>", "<|end|><|start|>assistant")
    return one.calls.openers if one.calls else ()


def vocabulary_of(one: OutputFormat, *, with_special: bool) -> Vocabulary:
    """with_special: the delimiters are special tokens; else they are tokens of plain text."""
    delimiters = list(dict.fromkeys(text for text in one.delimiters if len(text) > 1))
    lines = [f"\n{text}" for text in delimiters if text.startswith("<")]
    closers = [
        "</｜DSML｜parameter>\n",
        "</｜DSML｜ parameter>\n",
        "</｜DSML｜invoke>\n<",
        "</｜DSML｜ invoke>\n<",
    ]
    starts = ['{"name": "', "[get_weather(", "\n<"]
    if with_special:
        return Vocabulary(delimiters, [", ", "\n</parameter>\n", *starts])
    return Vocabulary(
        [],
        [
            *delimiters,
            *lines,
            *(closers if "DSML" in str(delimiters) else []),
            ", ",
            *starts,
            *openers_of(one),
        ],
    )


def parse(one: OutputFormat, text: str, offered: list[dict[str, Any]]) -> list[Piece]:
    parser = one.parser("<|start|>assistant" if one.is_harmony else "", offered)
    return [*parser.feed(text), *parser.finish()]


def check_calls(pieces: list[Piece], offered: list[dict[str, Any]]) -> list[ToolCall]:
    """Returns the calls; each is of a tool of the request, with arguments that its schema allows."""
    calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in offered
    }
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])
    return calls


def names_called(
    one: OutputFormat, texts: Iterable[str], offered: list[dict[str, Any]], *, least: int
) -> set[str]:
    """Each text must be one valid call, and nothing else. Ends after `least` texts once all tools were
    called."""
    called: set[str] = set()
    for number, text in enumerate(texts):
        if number >= least and len(called) == len(offered):
            break
        pieces = parse(one, text, offered)
        assert not any(isinstance(piece, Content) for piece in pieces), (text, pieces)
        (call,) = check_calls(pieces, offered)
        called.add(call.name)
    return called


@LEAST
@pytest.mark.parametrize(("one", "with_special"), CASES)
def test_a_required_call_is_exactly_one_valid_call(one: OutputFormat, with_special: bool, least: int) -> None:
    offered = tools(*TOOLS)
    vocabulary = vocabulary_of(one, with_special=with_special)
    grammar = one.tool_grammar(offered, required=True, parallel=False, special_ids=vocabulary.special_ids)
    texts = vocabulary.walks(grammar, seed=1, count=40, prefer=12)
    assert names_called(one, texts, offered, least=least) == set(TOOLS)


@LEAST
@pytest.mark.parametrize("one", CALLING, ids=lambda one: one.name)
def test_parallel_calls_are_one_or_more_valid_calls(one: OutputFormat, least: int) -> None:
    offered = tools("get_weather", "now")
    vocabulary = vocabulary_of(one, with_special=True)
    grammar = one.tool_grammar(offered, required=True, parallel=True, special_ids=vocabulary.special_ids)
    counts: list[int] = []
    takes_several = one.name not in ("harmony", "llama_json")
    for text in vocabulary.walks(grammar, seed=2, count=25, prefer=3):
        if len(counts) >= least and min(counts) == 1 and (max(counts) > 1) == takes_several:
            break
        pieces = parse(one, text, offered)
        assert not any(isinstance(piece, Content) for piece in pieces), (text, pieces)
        counts.append(len(check_calls(pieces, offered)))
    assert min(counts) == 1
    # Harmony's answers end with the first call, and templates of Llama 3 take one call a message.
    assert (max(counts) > 1) == takes_several


@LEAST
@pytest.mark.parametrize(("one", "with_special"), CASES)
def test_calls_that_are_not_required_are_valid_or_text_comes(
    one: OutputFormat, with_special: bool, least: int
) -> None:
    offered = tools("get_weather", "now")
    vocabulary = vocabulary_of(one, with_special=with_special)
    grammar = one.tool_grammar(offered, required=False, parallel=False, special_ids=vocabulary.special_ids)
    kinds: set[type] = set()
    for number, text in enumerate(vocabulary.walks(grammar, seed=3, count=60, prefer=12)):
        if number >= 2 * least and kinds == {Content, ToolCall}:
            break
        pieces = parse(one, text, offered)
        calls = check_calls(pieces, offered)
        assert len(calls) <= 1
        kinds |= {type(piece) for piece in pieces} - {Reasoning}
    assert kinds == {Content, ToolCall}


POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"type": "integer"}, "any": {}},
    "required": ["x"],
    "additionalProperties": False,
}
WORDS = ["from", "class", "None", "gr\u00f6\u00dfe", "\ufb01x"]
ODD_TOOLS = {
    "get-time": {"$ref": "#/$defs/point", "$defs": {"point": POINT}},
    "a.b-c": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]},
    "class": {
        "properties": {word: {"type": "boolean"} for word in WORDS},
        "required": WORDS,
        "additionalProperties": False,
    },
    "1st": {"type": "object"},
}


@LEAST
@pytest.mark.parametrize("one", CALLING, ids=lambda one: one.name)
def test_names_numbers_and_references_of_any_kind_make_valid_calls(one: OutputFormat, least: int) -> None:
    functions = [{"name": name, "parameters": schema} for name, schema in ODD_TOOLS.items()]
    offered = [{"type": "function", "function": function} for function in functions]
    vocabulary = vocabulary_of(one, with_special=True)
    grammar = one.tool_grammar(offered, required=True, parallel=False, special_ids=vocabulary.special_ids)
    texts = vocabulary.walks(grammar, seed=8, count=30, prefer=12)
    assert names_called(one, texts, offered, least=least) == set(ODD_TOOLS)


@pytest.mark.parametrize("one", CALLING, ids=lambda one: one.name)
def test_arguments_that_are_no_object_are_refused(one: OutputFormat) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    with pytest.raises(RequestError, match='the tool \'f\': type is "string", it must be "object"'):
        one.tool_grammar(offered, required=True, parallel=False, special_ids={})


@pytest.mark.parametrize("one", CALLING, ids=lambda one: one.name)
def test_a_grammar_is_about_as_long_as_its_schemas(one: OutputFormat) -> None:
    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(4)}
    circle = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/circle"}, {"type": "string"}]}
    schema = {
        "type": "object",
        "properties": {
            "s": {"$ref": "#/$defs/d0"},
            "c": {"$ref": "#/$defs/circle"},
            "t": {"anyOf": [{"type": "string"}, True]},
        }
        | {f"p{i}": {"type": "integer"} for i in range(200)},
        "$defs": {**levels, "d4": {"type": "string", "maxLength": 3}, "circle": circle},
    }
    offered = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = one.tool_grammar(offered, required=True, parallel=False, special_ids={})
    definitions = json.dumps(schema["$defs"])
    assert len(grammar.replace(definitions[1:-1], "")) < 200_000


STRINGS: tuple[dict[str, Any], ...] = (
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "b[0-9]", "maxLength": 4},
    {"type": "string", "pattern": "^x|y$", "maxLength": 9},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"const": "only </b> this"},
    {"enum": ["a\nb", ""]},
    {"enum": ["\na\n", "\n", " x "]},
    {"type": "string", "pattern": "^[\\n ]{1,3}x?$"},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 3},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "enum": ["longer"]}]},
    {"type": ["string", "integer", "null"], "maxLength": 3},
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 2},
        ]
    },
    {"$ref": "#/$defs/short"},
    {"anyOf": [{"type": "string", "maxLength": 2}, False]},
    {"allOf": [{"$ref": "#/$defs/short"}], "description": "what pydantic writes"},
)


@LEAST
@pytest.mark.parametrize("name", ["qwen_xml", "mimo", "glm", "glm_lines", "deepseek_v32"])
@pytest.mark.parametrize("schema", STRINGS, ids=json.dumps)
def test_strings_between_tags_keep_their_schema(name: str, schema: dict[str, Any], least: int) -> None:
    one = find_format(None, name=name)
    short = {"type": "string", "maxLength": 4}
    parameters = {"type": "object", "properties": {"s": schema}, "required": ["s"], "$defs": {"short": short}}
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    vocabulary = vocabulary_of(one, with_special=True)
    grammar = one.tool_grammar(offered, required=True, parallel=False, special_ids=vocabulary.special_ids)
    for text in vocabulary.walks(grammar, seed=4, count=min(least, 15), prefer=12):
        pieces = parse(one, text, offered)
        (call,) = check_calls(pieces, offered)
        jsonschema.validate(json.loads(call.arguments), parameters, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"s": {"type": "string", "format": "hostname"}}}, "'s' of the tool 'f': 'format: hostname' cannot be enforced"),
        ({"properties": {"s": {"type": "string", "contentEncoding": "base64"}}}, "'contentEncoding' cannot be enforced"),
        ({"properties": {"s": {"type": "string", "not": {"const": "x"}}}}, "'not' cannot be enforced"),
        ({"properties": {"s": {"enum": ["a</parameter>"]}}}, "'enum' cannot be enforced"),
        ({"properties": {"a>b": {}}}, "its name cannot be written"),
        ({"properties": {}, "minProperties": 1}, "the tool 'f': 'minProperties' cannot be enforced"),
    ],
)  # fmt: skip
def test_what_a_form_of_tags_cannot_enforce_is_refused_by_name(
    parameters: dict[str, Any], message: str
) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(RequestError, match=message):
        find_format(None, name="qwen_xml").tool_grammar(
            offered, required=True, parallel=False, special_ids={}
        )


def test_names_that_are_none_in_python_are_refused_where_calls_are_python() -> None:
    offered = [{"function": {"name": "f", "parameters": {"properties": {"a-b": {}}}}}]
    with pytest.raises(RequestError, match="its name is none in Python"):
        find_format(None, name="pythonic").tool_grammar(
            offered, required=True, parallel=False, special_ids={}
        )


@pytest.mark.parametrize("name", ["plain", "think"])
def test_a_format_without_calls_refuses_to_enforce_them(name: str) -> None:
    with pytest.raises(RequestError, match="--tool-format"):
        find_format(None, name=name).tool_grammar(tools("now"), required=True, parallel=False, special_ids={})
