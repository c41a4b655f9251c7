"""Texts of random schemas on the embedded model: valid, and the same at every depth, alone, in a crowd and
after preemption.

The schemas bound every text (headway_testing/schemas.py), the oracle of what is valid is the jsonschema
package.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from headway_testing.exactness import Case, assert_same_text
from headway_testing.local import LocalEngine, Output
from headway_testing.schemas import Schema, random_schema

from headway.engine.demo.heldout import heldout_prompts
from headway.engine.grammar.compile import json_schema_source
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams
from headway.server.json_schema import enforceable
from headway.server.text.tokenizer import Tokenizer, load_tokenizer

MODEL = str(files("headway.engine.demo"))
MAX_TOKENS = 300
PLAIN_TOKENS = 40
MIN_SHARE_STOPPED = 0.95
KV_BYTES = 1 << 26
TINY_KV_BYTES = 9 << 19  # holds less than the eight requests of four schemas want
NUM_SCHEMAS = [4, pytest.param(300, marks=pytest.mark.long)]


@dataclass(frozen=True)
class Wish:
    """A request and what its text must be; None: anything."""

    case: Case
    schema: Schema | None


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(MODEL), read_model_spec(MODEL).vocab_size)


@cache
def token_table() -> TokenTable:
    table = tokenizer().token_table()
    assert table is not None
    return table


@cache
def wishes(num_schemas: int) -> list[Wish]:
    """Of so many schemas, each beside a plain request."""
    made = []
    for number in range(num_schemas):
        chance = random.Random(number)
        text = chance.choice(heldout_prompts())
        prompt = tuple(text[: chance.randint(1, len(text))])
        sampling = SamplingParams(
            temperature=chance.choice([0.0, 0.6, 1.0, 1.5]), seed=chance.getrandbits(63), top_p=chance.choice([1, 0.9])
        )  # fmt: skip
        made.append(Wish(Case(prompt, MAX_TOKENS, sampling), random_schema(chance)))
        made.append(Wish(Case(prompt, PLAIN_TOKENS, sampling), None))
    return made


def engine_of(*, reads_late: bool = False, **changes: Any) -> LocalEngine:
    fixed = {"model_path": MODEL, "dtype": "float32", "depth": 3, "kv_cache_memory_bytes": KV_BYTES}
    return LocalEngine(EngineConfig(**(fixed | changes)), reads_late=reads_late, token_table=token_table())


def source_of(schema: Schema) -> str:
    """As the API process makes it, with bounds on the whitespace."""
    return json_schema_source(json.dumps(enforceable(schema, "response_format")))


def submit(engine: LocalEngine, wish: Wish) -> int:
    grammar = None if wish.schema is None else Grammar(source_of(wish.schema))
    return engine.submit(
        wish.case.prompt,
        max_tokens=wish.case.max_tokens,
        sampling=wish.case.sampling,
        stop_token_ids=token_table().end_ids if grammar is not None else (),
        grammar=grammar,
    )


def crowd(engine: LocalEngine, wished: Sequence[Wish]) -> list[Output]:
    """All at once."""
    ids = [submit(engine, wish) for wish in wished]
    engine.run()
    return [engine.outputs[i] for i in ids]


def alone(engine: LocalEngine, wished: Sequence[Wish]) -> list[Output]:
    """One after the other."""
    return [crowd(engine, [wish])[0] for wish in wished]


def assert_same(wished: Sequence[Wish], expected: Sequence[Output], actual: Sequence[Output]) -> None:
    cases = [wish.case for wish in wished]
    texts = ([output.token_ids for output in outputs] for outputs in (expected, actual))
    assert_same_text(MODEL, cases, *texts, dtype="float32")


@cache
def undrafted(num_schemas: int) -> list[Output]:
    """What the others are compared with: a crowd without drafts."""
    return crowd(engine_of(depth=0), wishes(num_schemas))


def violation(wish: Wish, output: Output) -> str | None:
    """What is wrong with a text that has ended."""
    text = tokenizer().decode(output.token_ids[:-1])
    try:
        jsonschema.validate(json.loads(text), wish.schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{wish.schema}: {text!r}: {error}"
    return None


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_texts_end_and_are_valid(num_schemas: int) -> None:
    answers = zip(wishes(num_schemas), undrafted(num_schemas), strict=True)
    masked = [(wish, output) for wish, output in answers if wish.schema is not None]
    stopped = [(wish, output) for wish, output in masked if output.finish_reason is FinishReason.STOP]
    assert len(stopped) >= MIN_SHARE_STOPPED * len(masked)
    assert {output.finish_reason for _, output in masked} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert [error for wish, output in stopped if (error := violation(wish, output)) is not None] == []
    assert len({tuple(output.token_ids) for _, output in stopped}) > len(stopped) // 2


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_drafts_change_no_text(num_schemas: int, depth: int) -> None:
    engine = engine_of(depth=depth)
    assert_same(wishes(num_schemas), undrafted(num_schemas), crowd(engine, wishes(num_schemas)))
    masked = [engine.outputs[i] for i, wish in enumerate(wishes(num_schemas)) if wish.schema is not None]
    assert sum(output.num_accepted for output in masked) > 0


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_a_crowd_changes_no_text(num_schemas: int) -> None:
    assert_same(
        wishes(num_schemas), undrafted(num_schemas), alone(engine_of(prefix_caching=False), wishes(num_schemas))
    )  # fmt: skip


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_masked_rows_leave_the_others_unchanged(num_schemas: int) -> None:
    plain = [wish for wish in wishes(num_schemas) if wish.schema is None]
    among_masked = [
        output
        for wish, output in zip(wishes(num_schemas), undrafted(num_schemas), strict=True)
        if wish.schema is None
    ]
    assert_same(plain, crowd(engine_of(), plain), among_masked)


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_preemption_changes_no_text(num_schemas: int) -> None:
    engine = engine_of(max_model_len=544, kv_cache_memory_bytes=TINY_KV_BYTES)
    outputs = crowd(engine, wishes(num_schemas))
    assert engine.engine.scheduler.snapshot().num_preemptions > 0
    assert_same(wishes(num_schemas), undrafted(num_schemas), outputs)


@pytest.mark.parametrize("num_schemas", NUM_SCHEMAS)
def test_planning_a_step_before_the_last_is_read_changes_no_text(num_schemas: int) -> None:
    outputs = crowd(engine_of(reads_late=True), wishes(num_schemas))
    assert_same(wishes(num_schemas), undrafted(num_schemas), outputs)
