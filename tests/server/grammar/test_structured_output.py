"""Fields that say what a text may be: from the body to the grammar that the engine gets, or to a 400."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from headway_testing.fake_chat import RoleLines
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.grammars import fits

from headway.server.grammar.grammars import Grammars, no_grammars
from headway.server.json_schema import WRITING
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
HELLO = {"role": "user", "content": "hello"}
LEAST: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "the quick", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": [HELLO], "max_tokens": 4}),
}
POINT = {
    "type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "point", "schema": POINT, "strict": False, "description": "where"},
}
LARK = 'start: "move " DIRECTION\nDIRECTION: "up" | "down"'
FITS = '{"x": 1, "y": -2}'
GBNF = r"""# a list, as llama.cpp writes it
root ::= "\x5b" item ("," item)* "]"
item ::= [0-9]+ | "\u00e9" [/]
"""
FORMS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "json-object": ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, null]}', '{\n  "a": 1\n}'], ["[]", "1", "{", '{  "a": 1}']),
    "json-schema": ({"response_format": FORMAT}, [FITS, '{"x":1,"y":2}'], ['{"x": 1}', '{"x": 1, "y": 2, "z": 3}', '{"x": 1.5, "y": 2}']),
    "any-schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, ["1", "[]"], ["", "one"]),
    "json-object-of-a-schema": ({"response_format": {"type": "json_object", "schema": POINT}}, [FITS], ['{"y": 2}']),
    "schema-beside-the-type": ({"response_format": {"type": "json_schema", "schema": POINT}}, [FITS], ["{}"]),
    "schema-and-name-beside-the-type": ({"response_format": {"type": "json_schema", "name": "p", "strict": True, "schema": POINT}}, [FITS], ["{}"]),
    "one-schema-in-two-places": ({"response_format": {**FORMAT, "schema": FORMAT["json_schema"]["schema"]}}, [FITS], ["{}"]),
    "json-value": ({"response_format": {"type": "json", "value": POINT}}, [FITS], ["{}"]),
    "json-value-as-text": ({"response_format": {"type": "json", "value": json.dumps(POINT)}}, [FITS], ["{}"]),
    "json-of-a-schema": ({"response_format": {"type": "json", "schema": POINT}}, [FITS], ["{}"]),
    "json-without-a-schema": ({"response_format": {"type": "json"}}, ["{}"], ["[]"]),
    "json-schema-value": ({"response_format": {"type": "json_schema", "value": {"name": "p", "schema": POINT}}}, [FITS], ["{}"]),
    "regex-value": ({"response_format": {"type": "regex", "value": "[a-c]{2}"}}, ["ab"], ["abc"]),
    "tgi-grammar": ({"grammar": {"type": "json", "value": POINT}}, [FITS], ["{}"]),
    "tgi-grammar-regex": ({"grammar": {"type": "regex", "value": "[a-c]{2}"}}, ["ab"], ["abc"]),
    "sglang-regex": ({"regex": "[a-c]{2}"}, ["ab"], ["abc"]),
    "sglang-json-schema-as-text": ({"json_schema": json.dumps(POINT)}, [FITS], ["{}"]),
    "llama-json-schema": ({"json_schema": POINT}, [FITS], ["{}"]),
    "sglang-ebnf": ({"ebnf": 'root ::= verb " " ("up" | "down")\nverb ::= "move" | [j-k] "ump"'},
                    ["move up", "jump down", "kump up"], ["move", "lump up"]),
    "llama-gbnf": ({"grammar": GBNF}, ["[1,22]", "[7]", "[é/]"], ["[]", "[1,]", "[a]"]),
    "lark-as-grammar": ({"grammar": LARK}, ["move up", "move down"], ["move", "move left"]),
    "gbnf-as-guided-grammar": ({"guided_grammar": GBNF}, ["[1,22]"], ["[]"]),
    "ollama-json": ({"format": "json"}, ["{}"], ["[]"]),
    "ollama-schema": ({"format": POINT}, [FITS], ["{}"]),
    "one-form-by-two-names": ({"regex": "[a-c]{2}", "guided_regex": "[a-c]{2}"}, ["ab"], ["abc"]),
    "guided-json": ({"guided_json": POINT}, [FITS], ["{}"]),
    "guided-json-as-text": ({"guided_json": json.dumps(POINT)}, [FITS], ["{}"]),
    "guided-json-object": ({"guided_json_object": True}, ["{}"], ["[]"]),
    "guided-regex": ({"guided_regex": r"[a-c]{2}\d?"}, ["ab", "cc7"], ["a", "abc", "ab77"]),
    "guided-choice": ({"guided_choice": ["yes", 'a "quoted"\n word', "né"]}, ["yes", 'a "quoted"\n word', "né"], ["no", "ye", "yess"]),
    "guided-grammar": ({"guided_grammar": LARK}, ["move up", "move down"], ["move", "move left"]),
    "json": ({"structured_outputs": {"json": POINT}}, [FITS], ["{}"]),
    "json-as-text": ({"structured_outputs": {"json": json.dumps(POINT)}}, [FITS], ["{}"]),
    "object": ({"structured_outputs": {"json_object": True}}, ["{}"], ["1"]),
    "regex": ({"structured_outputs": {"regex": "a+", "disable_fallback": True}}, ["aa"], ["", "b"]),
    "choice": ({"structured_outputs": {"choice": ["red", "green"]}}, ["red"], ["blue"]),
    "grammar": ({"structured_outputs": {"grammar": f"{LARK}\n# stop= and %json {{ in a comment"}}, ["move up"], ["up"]),
    "grammar-with-json": ({"guided_grammar": 'start: "a" %json {"enum": [1, 2]} "z"'}, ["a1z"], ["a3z"]),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(tokenizer: Tokenizer) -> AsyncIterator[Grammars]:
    """Those of all tests of this module, for a worker takes longer to start than any of them."""
    grammars = Grammars(tokenizer.token_table(), INFO.vocab_size)
    yield grammars
    await grammars.close()


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, grammars: Grammars) -> Services:
    return fake_services(engine, tokenizer, RoleLines(), grammars=grammars)


async def post(client: httpx.AsyncClient, endpoint: str = "completions", **fields: Any) -> httpx.Response:
    path, least = LEAST[endpoint]
    return await client.post(path, json={**least, **fields})


async def refusal(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await post(client, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("endpoint", LEAST)
@pytest.mark.parametrize(("fields", "fitting", "others"), FORMS.values(), ids=FORMS)
async def test_the_engine_gets_the_form_as_a_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, endpoint: str, fields: dict[str, Any], fitting: list[str], others: list[str]
) -> None:  # fmt: skip
    response = await post(client, endpoint, **fields)
    assert response.status_code == 200, response.text
    (submit,) = engine.submitted
    assert submit.grammar is not None
    assert submit.grammar.thinking is None
    source = submit.grammar.source
    assert [text for text in fitting + others if fits(source, text)] == fitting


@pytest.mark.parametrize("endpoint", LEAST)
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"response_format": {"type": "text"}}, {"response_format": {}}, {"structured_outputs": {}}, {"guided_json": {}}, {"guided_regex": ""},
        {"guided_choice": []}, {"guided_grammar": ""}, {"guided_json_object": False}, {"structured_outputs": {"json_object": False, "regex": None}},
        {"guided_decoding_backend": "auto"},
    ],
    ids=str,
)  # fmt: skip
async def test_values_that_ask_for_no_form_bring_no_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, endpoint: str, fields: dict[str, Any]
) -> None:
    assert (await post(client, endpoint, **fields)).status_code == 200
    assert [submit.grammar for submit in engine.submitted] == [None]


async def test_every_choice_has_the_grammar(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await post(client, prompt=["a", "b"], n=2, best_of=3, guided_choice=["x"])
    grammars = [submit.grammar for submit in engine.submitted]
    assert len(grammars) == 6
    assert grammars[0] is not None
    assert set(map(msgspec.json.encode, grammars)) == {msgspec.json.encode(grammars[0])}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
        {"guided_json": {"type": "integer"}, "structured_outputs": {"json": {"type": "integer"}}},
        {"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}},
    ],
)
async def test_the_same_form_by_two_names_is_one(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    for sent in (fields, {"structured_outputs": fields["structured_outputs"]}):
        assert (await post(client, max_tokens=1, **sent)).status_code == 200
    both, one = (submit.grammar for submit in engine.submitted)
    assert both is not None
    assert msgspec.json.encode(both) == msgspec.json.encode(one)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, ["guided_regex", "guided_choice"]),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, ["response_format", "structured_outputs.regex"]),
        ({"regex": "a", "guided_regex": "b"}, ["guided_regex", "regex"]), ({"ebnf": GBNF, "json_schema": {"type": "object"}}, ["json_schema", "ebnf"]),
        ({"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "b"'}}, ["guided_grammar", "structured_outputs.grammar"]),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, ["structured_outputs.regex", "structured_outputs.choice"]),
    ],
)  # fmt: skip
async def test_two_forms_are_refused_by_both_names(
    client: httpx.AsyncClient, fields: dict[str, Any], names: list[str]
) -> None:
    error = await refusal(client, **fields)
    assert error["param"] == names[1]
    assert error["message"] == f"{names[0]} and {names[1]} both say what the text may be; send one of them"


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_tokens", 2), ("logit_bias", {"5": 1}), ("bad_words", ["x"]), ("allowed_token_ids", [5]), ("ignore_eos", True)],
)  # fmt: skip
async def test_what_cannot_hold_beside_a_grammar_is_refused_by_both_names(
    client: httpx.AsyncClient, engine: FakeEngine, field: str, value: object
) -> None:
    error = await refusal(client, response_format=FORMAT, **{field: value})
    assert error["param"] == field
    assert error["message"].startswith(
        f"{field} cannot be served together with response_format.json_schema.schema"
    )
    assert not engine.submitted


async def test_other_fields_hold_beside_a_grammar(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    beside = {
        "stop": ["}"],
        "stop_token_ids": [7],
        "presence_penalty": 1,
        "repetition_penalty": 1.2,
        "echo": True,
        "logprobs": 1,
    }
    assert (
        await post(client, response_format=FORMAT, min_tokens=0, ignore_eos=False, logit_bias={}, **beside)
    ).status_code == 200
    (submit,) = engine.submitted
    assert submit.grammar is not None
    assert submit.sampling.presence_penalty == 1


SCHEMA = "response_format.json_schema.schema"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"response_format": {"type": "xml"}}, "response_format.type", "'xml', it must be one of text, json_object, json_schema"),
    "no-schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA, "is missing"),
    "no-json-schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    "two-types": ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.type", "json_schema"),
    "misplaced-schema": ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "json_object"),
    "long-name": ({"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": {}}}}, "response_format.json_schema.name", "at most 64"),
    "unknown": ({"response_format": {"type": "text", "strcit": True}}, "response_format.strcit", "did you mean response_format.strict"),
    "two-schemas": ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": POINT}}}, "response_format.schema", "differ; send one"),
    "no-pattern": ({"response_format": {"type": "regex"}}, "response_format.value", "is missing"),
    "no-schema-anywhere": ({"response_format": {"type": "json_schema", "name": "x"}}, "response_format.json_schema", "is missing"),
    "format": ({"format": "yaml"}, "format", "'json' or a schema"),
    "gbnf-rule": ({"grammar": "root ::= nowhere"}, "grammar", "Rule 'nowhere' not found"),
    "gbnf-cut": ({"ebnf": 'root ::= "a'}, "ebnf", "Unexpected end of input"),
    "gbnf-long-number": ({"ebnf": 'root ::= "a"{1' + "0" * 5000 + "}"}, "ebnf", "a number that cannot be read"),
    "gbnf-operator": ({"ebnf": "root ::= [a-z&&[b]]"}, "ebnf", "has one of &&, --, ~~"),
    "keyword": (strict({"properties": {"a/b": {"type": "array", "uniqueItems": True}}}), SCHEMA, "uniqueItems at #/properties/a~1b cannot be enforced"),
    "misspelt": (strict({"maxLenght": 3}), SCHEMA, "'maxLenght' at # is no keyword that is known; did you mean maxLength?"),
    "no-json": ({"guided_json": "{"}, "guided_json", "is no JSON schema"),
    "list": ({"guided_json": "[]"}, "guided_json", "must be an object, true or false"),
    "oneof": (strict({"items": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}), SCHEMA, "oneOf at #/items cannot be enforced: its members"),
    "format-of-a-string": (strict({"properties": {"a": {"type": "string", "format": "path"}}}), SCHEMA, "format at #/properties/a is 'path', it must be one of date,"),
    "name-patterns": (strict({"patternProperties": {"^a": True, "b$": {}}}), SCHEMA, "patternProperties at # cannot be enforced: a name may match two"),
    "some-required": (strict({"properties": {"a": {}}, "maxProperties": 1}), SCHEMA, "maxProperties at # cannot be enforced: it needs"),
    "divisor": (strict({"multipleOf": 0.07}), SCHEMA, "multipleOf at # cannot be enforced: its decimals"),
    "oneof-of-zeros": (strict({"oneOf": [{"const": 0}, {"enum": [1, -0.0]}]}), SCHEMA, "oneOf at # cannot"),
    "empty": ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json", "the schema at # allows no value"),
    "circle": ({"guided_json": {"$ref": "#"}}, "guided_json", "the schema at # allows no value"),
    "deep": ({"guided_json": {"const": json.loads("[" * 500 + "]" * 500)}}, "guided_json", "nested too deeply"),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "long-regex": ({"guided_regex": "a" * 9000}, "guided_regex", "has 9000 characters of regex, the limit is 8192"),
    "lark": ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    "lark-option": ({"guided_grammar": 'start: a\na[stop="x"]: /.*/'}, "guided_grammar", "has the option stop="),
    "lark-json": ({"guided_grammar": 'start: %json {"not": {}}'}, "guided_grammar", "not at # cannot be enforced"),
    "lark-json-with-options": ({"guided_grammar": f'start: %json {json.dumps({"x-guidance": WRITING, "not": {}})}'}, "guided_grammar", "x-guidance at #"),
    "lark-no-json": ({"guided_grammar": "start: %json {"}, "guided_grammar", "a %json that is no JSON"),
    "lark-json-long-number": ({"guided_grammar": 'start: %json {"minimum": 1' + "0" * 5000 + "}"}, "guided_grammar", "no JSON: Integer value out of range"),
    "lark-json-great-number": ({"guided_grammar": 'start: %json {"minimum": 1' + "0" * 400 + "}"}, "guided_grammar", "minimum at # is 1000"),
    "lark-json-surrogate": ({"guided_grammar": r'start: %json {"$ref": "#/$defs/\ud800", "$defs": {"\ud800": {}}}'}, "guided_grammar", "a %json that is no JSON"),
    "no-lark": ({"guided_grammar": ' {"grammars": [{"json_schema": {"not": {}, "x-guidance": {"lenient": true}}}]}'}, "guided_grammar", "is JSON"),
    "empty-choice": ({"guided_choice": ["a", ""]}, "guided_choice", "an empty string"),
    "many-choices": ({"guided_choice": ["a"] * 1025}, "guided_choice", "at most 1024"),
    "tag": ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not served"),
    "whitespace": ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "leave it out"),
}  # fmt: skip


# Fields of forms that are not strict: (fields, what is told as ignored, a text that fits, one that does not).
LENIENT: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "int64": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "format": "int64"}}}}, "", "7", "1.5"),
    "int32": ({"structured_outputs": {"json": {"type": "integer", "format": "int32"}}}, "", "2147483647", "2147483648"),
    "a-set": ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json.uniqueItems", "[1,1]", "1"),
    "path": ({"guided_json": {"type": "object", "properties": {"p": {"type": "string", "format": "path"}}}}, "guided_json.properties.p.format", '{"p":"a"}', '{"p":1}'),
    "some-constants": ({"guided_json": {"enum": ["a", "a\x7f", 2**60]}}, "guided_json.enum", '"a"', '"b"'),
    "look-around": ({"guided_json": {"type": "string", "pattern": "^(?!a)", "maxLength": 2}}, "guided_json.pattern", '"ab"', '"abc"'),
    "intricate": ({"guided_json": {"type": "string", "format": "email", "pattern": r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,})+$", "minLength": 6}}, "guided_json.pattern, guided_json.minLength", '"a@b.cd"', '"a"'),
    "void": ({"guided_json": {"required": "a", "type": "object"}}, "guided_json.required", "{}", "[]"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "told", "fitting", "other"), LENIENT.values(), ids=LENIENT)
async def test_without_strictness_what_cannot_be_enforced_is_told(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    services: Services,
    fields: dict[str, Any],
    told: str,
    fitting: str,
    other: str,
) -> None:
    for _ in range(2):  # the second is remembered
        response = await post(client, **fields)
        assert response.status_code == 200, response.text
        assert set(response.headers.get("x-headway-ignored", "").split(", ")) == set(told.split(", "))
    assert services.logged_fields == {path.rpartition(".")[2] for path in told.split(", ") if path}
    grammar = engine.submitted[-1].grammar
    assert grammar is not None
    assert [text for text in (fitting, other) if fits(grammar.source, text)] == [fitting]


@pytest.mark.parametrize(("fields", "param", "complaint"), BAD.values(), ids=BAD)
async def test_what_cannot_be_enforced_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], param: str, complaint: str
) -> None:
    error = await refusal(client, **fields)
    assert error["param"] == param
    assert complaint in error["message"]
    assert "<state>" not in error["message"]
    assert not engine.submitted


# As guidance's own client writes a schema into a grammar.
GUIDANCE = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
    "lenient": False,
}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [({}, None), ({"whitespace_flexible": True}, None), ({"lenient": True}, "x-guidance at #"), ({"item_separator": ";"}, "x-guidance at #"),
     ({"whitespace_pattern": " "}, "x-guidance at #"), ({"json_allowed_escapes": "u"}, "x-guidance at #")],
)  # fmt: skip
async def test_a_schema_may_say_how_its_text_is_written(
    client: httpx.AsyncClient, changed: dict[str, Any], complaint: str | None
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"const": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    grammar = f"start: %json {json.dumps(schema | {'x-guidance': GUIDANCE | changed})}"
    if complaint is None:
        assert (await post(client, guided_grammar=grammar)).status_code == 200
    else:
        assert complaint in (await refusal(client, guided_grammar=grammar))["message"]


async def test_synthetic_acceptance_has_no_grammars(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info = msgspec.structs.replace(INFO, synthetic_acceptance=(0.5,))
    error = await refusal(client, guided_regex="a")
    assert "--synthetic-acceptance" in error["message"]


class TestWithoutAnEnd:
    @pytest.fixture
    def grammars(self) -> Grammars:
        return no_grammars()

    async def test_a_model_without_an_end_token_has_no_grammars(self, client: httpx.AsyncClient) -> None:
        error = await refusal(client, guided_regex="a")
        assert (error["param"], error["code"]) == ("guided_regex", "unsupported_parameter")
