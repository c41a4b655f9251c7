"""Grammars are checked in a process that a hostile one may take with it, each form once, and nobody waits long."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from headway_testing.grammars import END, TABLE, fits
from prometheus_client import CollectorRegistry

from headway.engine import RequestError
from headway.server import grammars as module
from headway.server.errors import ApiError
from headway.server.grammar_frames import Kind, TextForm
from headway.server.grammars import Grammars
from headway.server.request_metrics import RequestMetrics

SECONDS = 2.0 + 0.5  # for a machine that does other things meanwhile
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
    """Members of a oneOf that only their last property tells apart."""
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


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(TABLE, END + 1)
    await grammars.warm_up()
    yield grammars
    await grammars.close()


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_form_is_a_source_or_a_refusal_in_time(grammars: Grammars, form: TextForm) -> None:
    gaps: list[float] = []

    async def streams() -> None:
        while True:
            gaps.append(time.monotonic())
            await asyncio.sleep(0.005)

    stream = asyncio.create_task(streams())
    start = time.monotonic()
    (outcome,) = await asyncio.gather(grammars.compile(form), return_exceptions=True)
    assert time.monotonic() - start < SECONDS
    stream.cancel()
    assert max((b - a for a, b in pairwise(gaps)), default=0) < 0.5
    if isinstance(outcome, RequestError):
        assert (outcome.param, outcome.code) == (form.param, "invalid_grammar")
        assert form.param in str(outcome)
        assert len(str(outcome)) < 700
    else:
        assert isinstance(outcome, str)


async def test_after_a_form_that_ended_the_process_others_are_served(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="takes more than a second of processor time"):
            await grammars.compile(HOSTILE["rules"])
    assert fits(await grammars.compile(schema({"enum": [1, 2]})), "2")


async def test_a_form_that_ended_the_process_is_not_checked_again(grammars: Grammars) -> None:
    with pytest.raises(RequestError):
        await grammars.compile(HOSTILE["rules"])
    start = time.monotonic()
    with pytest.raises(RequestError):
        await grammars.compile(HOSTILE["rules"])
    assert time.monotonic() - start < 0.05
    assert grammars._worker is None


async def test_a_process_that_is_killed_while_idle_is_replaced(grammars: Grammars) -> None:
    assert grammars._worker is not None
    grammars._worker.kill()
    await grammars._worker.wait()
    assert fits(await grammars.compile(regex("a+")), "aa")


async def test_a_client_that_leaves_does_not_mix_up_the_answers(grammars: Grammars) -> None:
    leaving = asyncio.create_task(grammars.compile(HOSTILE["formats"]))
    await asyncio.sleep(0.05)
    leaving.cancel()
    sources = await asyncio.gather(*(grammars.compile(schema({"enum": [i]})) for i in range(8)))
    assert [i for i, source in enumerate(sources) if fits(source, str(i))] == list(range(8))


async def test_a_process_that_does_not_start_is_no_fault_of_the_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_COMMAND", ("false",))
    with pytest.raises(ApiError) as caught:
        await Grammars(TABLE, END + 1).compile(regex("a"))
    assert (caught.value.status, caught.value.code) == (503, "grammar_unavailable")


async def test_grammars_are_counted_by_kind_and_outcome() -> None:
    registry = CollectorRegistry()
    grammars = Grammars(TABLE, END + 1, RequestMetrics(registry, "plain"))
    together = [grammars.compile(regex("a+")) for _ in range(3)]
    assert len(set(await asyncio.gather(*together))) == 1
    for _ in range(2):
        with pytest.raises(RequestError):
            await grammars.compile(lark("start: x"))
    await grammars.close()

    def count(kind: Kind, outcome: str) -> float | None:
        return registry.get_sample_value("headway_grammars_total", {"kind": kind, "outcome": outcome})

    assert (count("regex", "compiled"), count("regex", "cached"), count("lark", "refused")) == (1, 2, 2)
    assert count("json_schema", "compiled") == 0
    assert registry.get_sample_value("headway_grammar_compile_seconds_count") == 2


async def test_the_cache_is_bounded_in_number_and_in_characters(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CACHED", 2)
    for pattern in ("a", "b", "a", "c"):
        await grammars.compile(regex(pattern))
    assert [form.value for form in grammars._cache._found] == ["a", "c"]
    monkeypatch.setattr(module, "MAX_CACHED_CHARACTERS", 300)
    await grammars.compile(regex("d" * 100))
    assert [form.value[:1] for form in grammars._cache._found] == ["d"]
    assert grammars._cache._num_characters < 300
