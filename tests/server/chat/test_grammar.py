"""Calls that a request enforces: over a FakeEngine that draws its tokens from the masks of each request's
grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
import pytest_asyncio
from headway_testing.fake_chat import EndsWith
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.masked_script import masked_script
from headway_testing.tiny_tokenizers import save_with_delimiters

from headway.engine import RelaxedThinking, SamplingParams, ThinkingBudget, compile_matcher, make_tokenizer
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "move": {
        "type": "object", "additionalProperties": False, "required": ["to", "by"],
        "properties": {"to": {"type": "string", "maxLength": 6}, "by": {"type": "integer", "minimum": 0, "maximum": 99},
                       "how": {"enum": ["fast", "slow"]}},
    },
    "stop": {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"], "additionalProperties": False},
}  # fmt: skip
TEMPLATE = "<tool_call></think>"


def tools(*names: str, strict: Sequence[str] = ()) -> list[dict[str, Any]]:
    functions = [{"name": name, "parameters": SCHEMAS[name]} for name in names]
    return [
        {"type": "function", "function": f | ({"strict": True} if f["name"] in strict else {})}
        for f in functions
    ]


@pytest.fixture(scope="session", params=["special", "added", "spelled"])
def tokenizer(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return load_tokenizer(save_with_delimiters(folder, request.param))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(msgspec.structs.replace(INFO, max_model_len=4096))


@pytest.fixture
def ending() -> str:
    return "assistant:"


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars(tokenizer: Tokenizer) -> AsyncIterator[Grammars]:
    """Those of all tests of a tokenizer, for a worker takes longer to start than any of them."""
    table = tokenizer.token_table()
    assert table is not None
    grammars = Grammars(table, len(table.tokens))
    yield grammars
    await grammars.close()


@pytest.fixture
def services(
    engine: FakeEngine, tokenizer: Tokenizer, ending: str, template: str, grammars: Grammars
) -> Services:
    return fake_services(engine, tokenizer, EndsWith(ending), template=template, grammars=grammars)


def obey(engine: FakeEngine, tokenizer: Tokenizer, seed: int, before: str = "") -> None:
    """The engine keeps to the grammar, after a text that is none of its."""
    table = tokenizer.token_table()
    assert table is not None
    engine.script = masked_script(table, seed=seed, before=tokenizer.encode_plain(before))


async def chosen(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


async def refusal(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def valid_calls(choice: dict[str, Any]) -> list[str]:
    """The names of the calls, which are all of the answer and have arguments by their schemas."""
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    for function in functions:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return [function["name"] for function in functions]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
async def test_a_required_call_is_one_by_the_schema_of_its_tool(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, seed: int
) -> None:
    obey(engine, tokenizer, seed)
    choice = await chosen(client, tools=tools("move", "stop"), tool_choice="required")
    assert set(valid_calls(choice)) <= {"move", "stop"}
    single = await chosen(
        client, tools=tools("move", "stop"), tool_choice="required", parallel_tool_calls=False
    )
    assert len(valid_calls(single)) == 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_a_named_function_is_called_once(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, seed: int
) -> None:
    obey(engine, tokenizer, seed)
    named = {"type": "function", "function": {"name": "stop"}}
    assert valid_calls(await chosen(client, tools=tools("move", "stop"), tool_choice=named)) == ["stop"]


async def test_tools_that_are_neither_required_nor_strict_bring_no_grammar(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = lambda request: [*tokenizer.encode_plain("the dog"), tokenizer.stop_token_ids[0]]
    for body in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        await chosen(client, tools=tools("move"), **body)
    await chosen(client, tools=tools("move", strict=["move"]), tool_choice="none")
    assert [request.grammar for request in engine.submitted] == [None] * 4


@pytest.mark.parametrize(
    "text", ["the dog", '<tool_call>\n{"name": "move", "arguments": {"to": "a", "by": 5}}\n</tool_call>']
)
async def test_a_strict_tool_allows_text_and_calls_by_its_schema(
    client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, text: str
) -> None:
    ids = [*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]]
    engine.script = lambda request: ids
    await chosen(client, tools=tools("move", "stop", strict=["move"]))
    assert follows(engine, tokenizer, text)
    assert not follows(engine, tokenizer, text.replace("5", "500")) or text == "the dog"


def follows(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> bool:
    """The grammar that was submitted last allows the text to be all of an answer."""
    table = tokenizer.token_table()
    grammar = engine.submitted[-1].grammar
    assert table is not None
    assert grammar is not None
    matcher = compile_matcher(make_tokenizer(table, len(table.tokens)), grammar.source)
    ids = [*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]]
    return bool(matcher.validate_tokens(ids) == len(ids))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMAS["stop"]}}}, '{"now":true}', '{"now":1}'),
        ({"response_format": {"type": "json_object"}}, '{"a":[]}', "[]"),
        ({"guided_regex": "ab+/c"}, "abb/c", "ac"),
        ({"guided_choice": ["the", 'd"og']}, 'd"og', "dog"),
    ],
    ids=["schema", "object", "regex", "choice"],
)  # fmt: skip
async def test_a_form_and_tools_allow_the_one_and_the_other(
    client: httpx.AsyncClient,
    engine: FakeEngine,
    tokenizer: Tokenizer,
    form: dict[str, Any],
    good: str,
    bad: str,
) -> None:
    obey(engine, tokenizer, 1)
    await chosen(client, tools=tools("stop"), **form)
    call = '<tool_call>\n{"name": "stop", "arguments": {"now": true}}\n</tool_call>'
    assert [follows(engine, tokenizer, text) for text in (good, call, bad, f"x{call}")] == [
        True,
        True,
        False,
        False,
    ]
    await chosen(client, tools=tools("stop"), tool_choice="none", **form)
    assert [follows(engine, tokenizer, text) for text in (good, call, bad)] == [True, False, False]
    await chosen(client, tools=tools("stop"), tool_choice="required", **form)
    assert [follows(engine, tokenizer, text) for text in (good, call, bad)] == [False, True, False]


class TestReasoning:
    @pytest.fixture(
        params=["assistant:", "assistant:<think>\n", "assistant:<think>\n\n</think>\n\n"],
        ids=["none", "open", "closed"],
    )
    def ending(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    async def test_a_grammar_governs_what_follows_the_reasoning(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, ending: str
    ) -> None:
        before = {"assistant:": "<think>\nhm\n</think>", "assistant:<think>\n": "hm\n</think>"}.get(
            ending, ""
        )
        obey(engine, tokenizer, 5, before)
        choice = await chosen(client, tools=tools("stop"), tool_choice="required")
        assert set(valid_calls(choice)) == {"stop"}
        assert choice["message"]["reasoning_content"] == ("hm" if before else None)
        grammar = engine.submitted[0].grammar
        assert grammar is not None
        if ending.endswith("</think>\n\n"):
            assert grammar.thinking is None
            return
        assert grammar.thinking is not None
        assert tokenizer.full_vocabulary.decode(grammar.thinking.end_ids) == "</think>"
        assert (grammar.thinking.is_open, grammar.thinking.start_id) == (
            ending.endswith("<think>\n"), tokenizer.token_id("<think>")
        )  # fmt: skip

    async def test_a_budget_closes_the_reasoning_at_a_token(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, ending: str
    ) -> None:
        end_id = tokenizer.token_id("</think>")
        if end_id is None:
            error = await refusal(client, thinking_budget_tokens=64)
            assert (error["param"], error["code"]) == ("thinking_budget_tokens", "unsupported_parameter")
            return
        for num_tokens in (64, 0, -1, None):
            await chosen(client, thinking_budget_tokens=num_tokens, max_tokens=4)
        start_id = tokenizer.token_id("<think>")
        places = {"assistant:": (65, end_id, start_id), "assistant:<think>\n": (64, end_id)}
        expected = ThinkingBudget(*places[ending]) if ending in places else None
        sampling = [request.sampling.thinking_budget for request in engine.submitted]
        assert sampling[0] == expected
        assert (sampling[1] is None) == (expected is None)
        assert sampling[2:] == [None, None] == [SamplingParams().thinking_budget] * 2

    async def test_reasoning_is_lossy_where_the_server_is_and_the_request_is_not_exact(
        self, client: httpx.AsyncClient, engine: FakeEngine, tokenizer: Tokenizer, ending: str
    ) -> None:
        await chosen(client, max_tokens=4)
        engine.info = msgspec.structs.replace(INFO, relaxed_thinking=(5, 0.3))
        for exact in (True, False, None):
            await chosen(client, speculation={"exact": exact}, max_tokens=4)
        for path, body in (
            ("responses", {"input": "hello"}),
            ("messages", {"messages": HELLO, "max_tokens": 4}),
        ):
            response = await client.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
        start_id, end_id = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
        spans = {"assistant:": (end_id, start_id), "assistant:<think>\n": (end_id, None)}
        expected = RelaxedThinking(*spans[ending]) if ending in spans and end_id is not None else None
        relaxed = [request.sampling.relaxed_thinking for request in engine.submitted]
        assert relaxed == [None, None, expected, expected, None, None]


async def test_what_a_grammar_excludes_is_refused_by_both_names(client: httpx.AsyncClient) -> None:
    error = await refusal(client, tools=tools("stop"), tool_choice="required", min_tokens=3)
    assert error["param"] == "min_tokens"
    assert "tools" in error["message"]


async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_path(client: httpx.AsyncClient) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    given = [
        *tools("stop"),
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": wrong}},
    ]
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        error = await refusal(client, tools=given, tool_choice=choice)
        assert error["param"] == "tools[1].function.parameters"
        assert error["message"].startswith("tools[1].function.parameters: contains at #/properties/a")


# Schemas that people have: (parameters, what of them is not enforced).
LENIENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "schemars": ({"properties": {"n": {"type": "integer", "format": "uint32", "minimum": 0}}}, []),
    "a-set": ({"properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}, ["properties.tags.uniqueItems"]),
    "unknown-format": ({"properties": {"p": {"type": "string", "format": "path"}}}, ["properties.p.format"]),
    "misspelt": ({"properties": {"p": {"anyOf": [{"type": "string", "maxLenght": 3}]}}}, ["properties.p.anyOf[0].maxLenght"]),
    "two-patterns": ({"patternProperties": {"^a": {"type": "string"}, "b$": {"type": "number"}}}, ["patternProperties"]),
    "in-a-definition": ({"$defs": {"a": {"if": {}}}, "properties": {"p": {"$ref": "#/$defs/a"}}}, ["$defs.a.if"]),
    "draft-4": ({"$schema": "http://json-schema.org/draft-04/schema#", "properties": {}}, ["$schema"]),
    "overlapping": ({"properties": {"p": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, ["properties.p.oneOf"]),
    "a-name-for-a-schema": ({"properties": {"p": "string"}}, ["properties.p"]),
    "large": ({"properties": {"p": {"type": "integer", "maximum": 2**63 - 1}}}, ["properties.p.maximum"]),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "dropped"), LENIENT.values(), ids=LENIENT)
async def test_a_tool_that_is_not_strict_takes_down_no_other(
    client: httpx.AsyncClient, parameters: dict[str, Any], dropped: list[str]
) -> None:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    body = {"messages": HELLO, "max_tokens": 3, "tool_choice": "required"}
    given = [*tools("stop"), {"type": "function", "function": function}]
    response = await client.post(URL, json={**body, "tools": given})
    assert response.status_code == 200, response.text
    told = ", ".join(f"tools[1].function.parameters.{path}" for path in dropped)
    assert response.headers.get("x-headway-ignored", "") == told
    if dropped:
        function["strict"] = True
        error = await refusal(client, tools=given, tool_choice="required")
        assert error["param"] == "tools[1].function.parameters"
        keyword = dropped[0].rpartition(".")[2]
        assert keyword in error["message"]
        assert " at #" in error["message"]


async def test_a_type_and_a_reference_that_do_not_exist_are_refused_without_strictness(
    client: httpx.AsyncClient,
) -> None:
    for wrong in ({"type": "objekt"}, {"$ref": "#/$defs/none"}):
        function = {"name": "f", "parameters": {"type": "object", "properties": {"a": wrong}}}
        error = await refusal(
            client, tools=[{"type": "function", "function": function}], tool_choice="required"
        )
        assert error["param"] == "tools[0].function.parameters"
        assert "#/properties/a" in error["message"]


async def test_arguments_that_are_no_object_are_refused_where_they_are_enforced(
    client: httpx.AsyncClient,
) -> None:
    given = [
        *tools("stop"),
        {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
    ]
    error = await refusal(client, tools=given, tool_choice="required")
    assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
    assert "the tool 'f'" in error["message"]


class TestAFormatWithoutReasoning:
    @pytest.fixture
    def template(self) -> str:
        return "<tool_call>"

    async def test_a_budget_is_refused(self, client: httpx.AsyncClient) -> None:
        error = await refusal(client, thinking_budget_tokens=5)
        assert (error["param"], error["code"]) == ("thinking_budget_tokens", "unsupported_parameter")
