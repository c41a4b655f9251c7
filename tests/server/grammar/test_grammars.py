"""Grammars are checked in a process that a hostile one may take with it, each form once, and nobody waits
long."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise

import msgspec
import pytest
import pytest_asyncio
from headway_testing.grammars import END, TABLE, fits
from headway_testing.hostile_grammars import HOSTILE, lark, regex, schema
from prometheus_client import CollectorRegistry

from headway.engine import RequestError
from headway.server.base.errors import ApiError
from headway.server.base.worker_pool import CLIENT
from headway.server.grammar import grammars as module
from headway.server.grammar.frames import Checked, Kind, TextForm, ToolCalls
from headway.server.grammar.grammars import Grammars
from headway.server.json_schema import WRITING
from headway.server.telemetry.request_metrics import RequestMetrics

SECONDS = 1.0 + 0.1  # of processor time


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting() -> AsyncIterator[Grammars]:
    """Checks one form after the other, in processes that end only with a form that ends them."""
    grammars = Grammars(TABLE, END + 1, Taken())
    yield grammars
    await grammars.close()


class Taken:
    """Mutable: what the checks took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def observe_grammar(self, kind: Kind, outcome: str, seconds: float | None = None) -> None:
        if seconds is not None:
            self.seconds.append(seconds)

    def count_dropped_keyword(self, keyword: str) -> None:
        pass


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(TABLE, END + 1)
    await grammars.warm_up()
    yield grammars
    await grammars.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_form_is_a_source_or_a_refusal_in_time(lasting: Grammars, form: TextForm) -> None:
    await check_in_time(lasting, form)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("output_format", ["hermes", "qwen_xml", "llama_pythonic"])
@pytest.mark.parametrize(
    "name", ["product", "doubled", "many-values", "many-properties", "names", "one-of", "tree", "circle"]
)
async def test_a_tool_of_a_hostile_schema_is_a_source_or_a_refusal_in_time(
    lasting: Grammars, name: str, output_format: str
) -> None:
    inner = json.loads(HOSTILE[name].value)
    definitions = inner.pop("$defs", {})
    parameters = {"type": "object", "properties": {"a": inner}, "required": ["a"], "$defs": definitions}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    calls = ToolCalls(output_format, [(0, tool)], required=True, parallel=False)
    await check_in_time(lasting, TextForm("tools", json.dumps(msgspec.to_builtins(calls)), "tools"))


async def check_in_time(grammars: Grammars, form: TextForm) -> None:
    gaps: list[float] = []
    await grammars.warm_up()

    async def streams() -> None:
        while True:
            gaps.append(time.monotonic())
            await asyncio.sleep(0.005)

    stream = asyncio.create_task(streams())
    (outcome,) = await asyncio.gather(grammars.compile(form), return_exceptions=True)
    stream.cancel()
    assert isinstance(grammars._observer, Taken)
    assert max(grammars._observer.seconds) < SECONDS
    assert max((b - a for a, b in pairwise(gaps)), default=0) < 0.5
    if isinstance(outcome, RequestError):
        assert outcome.param in (form.param, "tools[0].function.parameters")
        assert outcome.code == "invalid_grammar"
        assert form.param in str(outcome)
        assert len(str(outcome)) < 700
    else:
        assert isinstance(outcome, str)


async def test_a_schema_within_a_grammar_is_refused_whatever_it_says_of_how_it_is_written(
    grammars: Grammars,
) -> None:
    held = json.dumps({"not": {"const": 1}, "x-guidance": WRITING})
    with pytest.raises(RequestError, match=r"not at # cannot be enforced|x-guidance at # "):
        await grammars.compile(lark(f"start: %json {held}"))


async def test_after_a_form_that_ended_the_process_others_are_served(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="takes more than a second of processor time"):
            await grammars.compile(HOSTILE["rules"])
    assert fits(await grammars.compile(schema({"enum": [1, 2]})), "2")


async def test_a_client_whose_forms_are_hostile_keeps_nobody_from_new_grammars(grammars: Grammars) -> None:
    """Neither another client nor another connection of the same one: 16 ask for what takes more than a second
    each, again and again."""
    await grammars.warm_up()
    stop, chance = asyncio.Event(), random.Random(0)
    num_attacks = 0

    async def attack() -> None:
        nonlocal num_attacks
        while not stop.is_set():
            with suppress(RequestError):
                await grammars.compile(regex(f"(a{{1000}}){{1000}}{chance.random()}"))
            num_attacks += 1

    attackers = [asyncio.create_task(attack()) for _ in range(16)]
    attacks_before = []
    for number, client in enumerate(["other", "other", "", "", "third", ""]):
        await asyncio.sleep(0.3)
        CLIENT.set(client)
        num_before = num_attacks
        assert fits(await grammars.compile(regex(f"a{{{number + 1}}}")), "a" * (number + 1))
        attacks_before.append(num_attacks - num_before)
    stop.set()
    for attacker in attackers:
        attacker.cancel()
    await asyncio.gather(*attackers, return_exceptions=True)
    assert max(attacks_before) <= 3


async def test_a_sound_form_is_served_on_a_machine_that_is_busy() -> None:
    """Stopped for longer than any form may take."""
    grammars = Grammars(TABLE, END + 1)
    await grammars.warm_up()
    assert grammars._pool.process is not None
    children = (await output_of("pgrep", "-P", str(grammars._pool.process.pid))).split()
    await output_of("kill", "-STOP", *children)
    checking = asyncio.create_task(grammars.compile(regex("abc")))
    await asyncio.sleep(2.2)
    await output_of("kill", "-CONT", *children)
    assert fits(await checking, "abc")
    await grammars.close()


async def output_of(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode()


async def test_forms_of_clients_that_leave_hold_nobody_up(grammars: Grammars) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError):
        await grammars.compile(HOSTILE["rules"])
    seconds = time.monotonic() - start
    for number in range(16):
        leaving = asyncio.create_task(grammars.compile(regex(f"(a{{1000}}){{1000}}{number}")))
        await asyncio.sleep(0.02)
        leaving.cancel()
    start = time.monotonic()
    await grammars.compile(regex("b"))
    assert time.monotonic() - start < 5 * seconds


async def test_a_form_that_ended_the_process_is_not_checked_again(grammars: Grammars) -> None:
    moments = []
    for _ in range(2):
        moments.append(time.monotonic())
        with pytest.raises(RequestError):
            await grammars.compile(HOSTILE["rules"])
    assert time.monotonic() - moments[1] < (moments[1] - moments[0]) / 2


async def test_a_process_that_is_killed_while_idle_is_replaced(grammars: Grammars) -> None:
    process = grammars._pool.process
    assert process is not None
    process.kill()
    await process.wait()
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


async def test_keywords_that_are_left_out_are_counted_by_name() -> None:
    registry = CollectorRegistry()
    grammars = Grammars(TABLE, END + 1, RequestMetrics(registry, "plain"))
    for _ in range(2):
        await grammars.compile(schema({"uniqueItems": True, "maxLenght": 3}), ignored := list[str]())
        assert ignored == ["guided_json.uniqueItems", "guided_json.maxLenght"]
    await grammars.close()
    for keyword in ("uniqueItems", "other"):
        assert registry.get_sample_value("headway_dropped_schema_keywords_total", {"keyword": keyword}) == 2


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
    grammars._cache.put(regex("e"), Checked(source="e", dropped=["f" * 300]))
    assert (len(grammars._cache._found), grammars._cache._num_characters) == (0, 0)
