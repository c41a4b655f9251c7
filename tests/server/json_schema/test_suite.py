"""The public JSON Schema Test Suite: every keyword is enforced, or refused by name and place; nothing invalid
is accepted."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice, permutations, product
from typing import Any

import jsonschema_rs
import pytest
from headway_testing.grammars import END, TABLE, fits, matcher, walk
from headway_testing.json_schema_suite import DRAFTS, Case, cases, suite_folder

from headway.engine import RequestError, make_grammar_check
from headway.server.grammar.frames import TextForm
from headway.server.grammar.sources import checked_source

VARIANTS = [
    ("draft2020-12", True),
    *(pytest.param("draft7", with_draft, marks=pytest.mark.slow) for with_draft in (False, True)),
]
MAX_ORDERS = 200
# Files with valid instances that no grammar writes, and why. docs/api.md says the same.
NARROWER = {
    "const.json": "1.0 for 1", "enum.json": "1.0 for 1", "type.json": "1.0 as an integer", "optional/float-overflow.json": "1e308 as an integer",
    "format.json": "formats that are annotations there", "optional/format/email.json": "quoted mailboxes", "optional/format/ipv6.json": "IPv4 within IPv6",
    "optional/ecmascript-regex.json": "control characters", "optional/format/date-time.json": "leap seconds", "optional/format/time.json": "leap seconds",
    "ref.json": "keywords beside $ref of draft 7, without $schema", "optional/bignum.json": "numbers beyond 2^53",
}  # fmt: skip
# Exponents and digits that no float has: valid JSON that the judge reads as another number.
HUGE = re.compile(r"[eE][+-]?\d{3}|[\d.]{16}")

CHECK = make_grammar_check(TABLE, END + 1)


@pytest.fixture(scope="module", autouse=True)
def suite() -> None:
    try:
        suite_folder()
    except OSError as error:
        pytest.skip(str(error))


def source_of(schema: Any) -> str:
    return checked_source(TextForm("json_schema", json.dumps(schema), "guided_json", strict=True), CHECK)


@cache
def served(draft: str, *, with_draft: bool) -> list[tuple[Case, str]]:
    found = []
    for case in cases(draft, with_draft=with_draft):
        try:
            found.append((case, source_of(case.schema)))
        except RequestError:
            continue
    return found


def refusals(draft: str, *, with_draft: bool) -> Iterator[RequestError]:
    for case in cases(draft, with_draft=with_draft):
        try:
            source_of(case.schema)
        except RequestError as error:
            yield error


def orders(value: Any) -> Iterator[Any]:
    """The value with its properties in every order."""
    if isinstance(value, list):
        yield from map(list, product(*(list(islice(orders(entry), MAX_ORDERS)) for entry in value)))
    elif isinstance(value, dict):
        for names in permutations(value):
            for entries in product(*(list(islice(orders(value[name]), MAX_ORDERS)) for name in names)):
                yield dict(zip(names, entries, strict=True))
    else:
        yield value


def accepts(found: Any, value: Any) -> bool:
    """The grammar allows the value with its properties in some order."""
    texts = (json.dumps(one, ensure_ascii=False) for one in islice(orders(value), MAX_ORDERS))
    return any(fits(found, text) for text in texts)


@pytest.mark.parametrize(("draft", "with_draft"), VARIANTS)
def test_no_invalid_instance_of_the_suite_is_accepted(draft: str, with_draft: bool) -> None:
    num_tried: Counter[bool] = Counter()
    narrower: set[str] = set()
    for case, source in served(draft, with_draft=with_draft):
        found = matcher(source)
        for value, is_valid in case.tests:
            is_accepted = accepts(found, value)
            assert is_valid or not is_accepted, (case.file, case.description, case.schema, value)
            if is_valid and not is_accepted:
                narrower.add(case.file)
            num_tried[is_valid] += 1
    assert narrower <= NARROWER.keys()
    assert min(num_tried.values()) > 350


@pytest.mark.parametrize(("draft", "with_draft"), VARIANTS)
def test_what_is_refused_of_the_suite_is_named_with_its_place(draft: str, with_draft: bool) -> None:
    refused: Counter[str] = Counter()
    for error in refusals(draft, with_draft=with_draft):
        assert (error.param, error.code) == ("guided_json", "invalid_grammar")
        named = re.match(r"guided_json: (.*?) at #", str(error))
        is_empty = "allows no value" in str(error)
        assert is_empty or named is not None, str(error)
        refused[(named[1] if named is not None else "") or "library"] += 1
    for keyword in ("not", "if", "contains", "propertyNames", "uniqueItems", "$ref", "format"):
        assert refused[keyword] >= 2, (keyword, refused)


def walks(draft: str, *, with_draft: bool, count: int) -> Counter[str]:
    """Random texts of every schema that is served, by another implementation's judgement."""
    chance = random.Random(draft)
    outcomes: Counter[str] = Counter()
    for case, source in served(draft, with_draft=with_draft):
        found = matcher(source)
        try:
            judge = jsonschema_rs.validator_for(case.schema, validate_formats=True)
        except jsonschema_rs.ValidationError:  # a list as items without the draft that has it
            outcomes["unjudged"] += 1
            continue
        for _ in range(count):
            text = walk(found, chance)
            if text is None or HUGE.search(text):
                outcomes["unfinished"] += 1
                continue
            assert judge.is_valid(json.loads(text)), (case.file, case.description, case.schema, text)
            outcomes["valid"] += 1
    return outcomes


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_a_grammar_writes_is_valid(draft: str) -> None:
    outcomes = walks(draft, with_draft=True, count=3)
    assert outcomes["valid"] > 450
    assert outcomes["unjudged"] == 0


@pytest.mark.long
@pytest.mark.parametrize(("draft", "with_draft"), VARIANTS)
def test_what_a_grammar_writes_is_valid_at_length(draft: str, with_draft: bool) -> None:
    assert walks(draft, with_draft=with_draft, count=60)["valid"] > 9000
