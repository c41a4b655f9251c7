"""What a grammar allows of random texts is what the schema allows, by an exact judge: never more, and less
only as docs/api.md lists."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from decimal import Decimal

import pytest
from headway_testing.grammars import fits, matcher
from headway_testing.schema_oracle import Judge, Schema, SchemaWriter, spellings

from headway.engine import RequestError, json_schema_source
from headway.server.json_schema import enforceable

NUM_VALUES = 14  # for each schema
SCHEMAS = [(seed, 75) for seed in range(4)] + [
    pytest.param(seed, 1250, marks=pytest.mark.long) for seed in range(100, 116)
]

_STRING = re.compile(r'"(?:\\.|[^"\\])*"')
_NUMBER = re.compile(r"-?[0-9][0-9.eE+-]*")
_UNWRITTEN = re.compile(r"[\x00-\x1f\x7f]")
_ESCAPES = re.compile(r"\\[u/]")


def is_listed(text: str) -> bool:
    """Whether docs/api.md lists how the text is written among what grammars do not write."""
    strings = _STRING.findall(text)
    if any(_ESCAPES.search(one) or _UNWRITTEN.search(one) for one in strings):
        return True
    return any(is_listed_number(number) for number in _NUMBER.findall(_STRING.sub("", text)))


def is_listed_number(text: str) -> bool:
    """Exponents, an integer with a fraction, zeros at the end, a zero with a sign, and what is next to
    nothing."""
    value = Decimal(text)
    return (
        "e" in text.lower()
        or text != f"{value.normalize():f}"
        or text == "-0"
        or 0 < abs(value) < Decimal("1e-16")
    )


def faults(schema: Schema, chance: random.Random) -> list[str]:
    """Returns what the grammar of a schema allows or forbids wrongly; raises RequestError for a schema that
    is refused."""
    judge = Judge(schema)
    writer = SchemaWriter(chance)
    texts = [text for _ in range(NUM_VALUES) for text in spellings(writer.value(schema), chance)]
    valid = {text for text in texts if judge.is_valid(text)}
    try:
        found = matcher(json_schema_source(json.dumps(enforceable(schema, "schema"))))
    except RequestError as error:
        if "nsatisfiable" in str(error) and (unlisted := [text for text in valid if not is_listed(text)]):
            return [f"refused as empty, though {unlisted[0]} fits: {error}"]
        raise
    wrong = []
    for text in dict.fromkeys(texts):
        is_accepted = fits(found, text)
        if is_accepted and text not in valid:
            wrong.append(f"wider: {text}")
        elif text in valid and not is_accepted and not is_listed(text):
            wrong.append(f"narrower: {text}")
    return wrong


@pytest.mark.parametrize(("seed", "num_schemas"), SCHEMAS)
def test_a_grammar_allows_what_its_schema_allows(seed: int, num_schemas: int) -> None:
    chance = random.Random(seed)
    wrong, refused = [], Counter[str]()
    for _ in range(num_schemas):
        schema = SchemaWriter(chance).schema()
        try:
            wrong += [f"{json.dumps(schema)}: {fault}" for fault in faults(schema, chance)]
        except RequestError as error:
            refused[re.sub(r".*: (the grammar|the pattern|enum|const)", r"\1", str(error))[:60]] += 1
    assert wrong == []
    assert refused.total() < num_schemas // 3, refused
