"""A grid of rows and contexts at depths that change: every text is the one of depth 0, alone, token by token.

The embedded model with its own acceptance, in float32 and without any excuse.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import chain
from typing import NamedTuple

import pytest
from headway_testing.exactness import Case, generate_with
from headway_testing.local import LocalEngine
from headway_testing.scripted_policy import MAX_DEPTH, ScriptedPolicy

from headway.engine.bench.settings import EMBEDDED
from headway.engine.build import measured_policy
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.8)
CHOOSERS = ("random", "auto")
NUM_TOKENS = 32
MOST_SPELL_ROUNDS = 4
NUM_SCRIPTED_ROUNDS = 20_000  # more than any engine runs here
KV_BYTES = 1 << 29  # holds the largest cell


class Cell(NamedTuple):
    num_rows: int
    context: int


SMALL = [Cell(1, 100), Cell(3, 33)]
WHOLE = [Cell(num_rows, context) for context in (16, 128, 500, 1500) for num_rows in (1, 2, 4, 8, 16, 32)]
Reference = Callable[[Case], list[int]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Returns the text of a request at depth 0, alone, in an engine without drafts."""
    engine = engine_of(depth=0)
    known: dict[tuple[tuple[int, ...], int, float], list[int]] = {}

    def write(case: Case) -> list[int]:
        assert case.sampling.seed is not None, "the seed is drawn"
        key = case.prompt, case.sampling.seed, case.sampling.temperature
        if key not in known:
            known[key] = generate_with(engine, [case])[0]
        return known[key]

    return write


def engine_of(**changes: object) -> LocalEngine:
    fixed = {
        "model_path": str(EMBEDDED),
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory_bytes": KV_BYTES,
    }
    return LocalEngine(EngineConfig(**(fixed | changes)))  # type: ignore[arg-type]


def cases_of(cell: Cell, temperature: float) -> list[Case]:
    """Each row reads source code that the model has not seen, from another place on; a row is the same in all
    cells of a context."""
    text = list(chain.from_iterable(heldout_prompts()))
    starts = (
        row * (len(text) - cell.context) // max(one.num_rows for one in WHOLE) for row in range(cell.num_rows)
    )
    return [
        Case(
            tuple(text[start : start + cell.context]),
            NUM_TOKENS,
            SamplingParams(temperature=temperature, seed=row),
        )
        for row, start in enumerate(starts)
    ]


def jumping_policy() -> ScriptedPolicy:
    """Changes the depth at random every few rounds."""
    chance = random.Random(0)
    script: list[int] = []
    while len(script) < NUM_SCRIPTED_ROUNDS:
        script += [chance.randint(0, MAX_DEPTH)] * chance.randint(1, MOST_SPELL_ROUNDS)
    return ScriptedPolicy(script)


def assert_grid(reference: Reference, cells: Iterable[Cell], chooser: str, temperature: float) -> int:
    """One engine for all cells, with a prefix cache that rounds of all depths have written. Returns the
    number of requests."""
    engine, num_compared = engine_of(depth=MAX_DEPTH, chooses_depth=True), 0
    policy = jumping_policy() if chooser == "random" else measured_policy(engine.engine)
    engine.engine.scheduler.set_depth_policy(policy)  # type: ignore[arg-type]
    for cell in cells:
        cases = cases_of(cell, temperature)
        for row, (case, found) in enumerate(zip(cases, generate_with(engine, cases), strict=True)):
            assert found == reference(case), f"{cell}, row {row}"
            num_compared += 1
    stats = engine.engine.scheduler.snapshot()
    assert set(stats.rounds_by_depth) == set(range(MAX_DEPTH + 1)) or chooser == "auto"
    assert stats.num_accepted_tokens > 0
    return num_compared


@pytest.mark.parametrize(
    ("chooser", "temperature"),
    [
        ("random", 0.8),
        pytest.param("auto", 0.0, marks=pytest.mark.slow),
        pytest.param("random", 0.0, marks=pytest.mark.long),
        pytest.param("auto", 0.8, marks=pytest.mark.long),
    ],
)
def test_depths_that_change_leave_every_text_as_it_is(
    reference: Reference, chooser: str, temperature: float
) -> None:
    assert assert_grid(reference, SMALL, chooser, temperature) == 4


@pytest.mark.long
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_depths_that_change_leave_every_text_of_the_whole_grid_as_it_is(
    reference: Reference, chooser: str, temperature: float
) -> None:
    assert assert_grid(reference, WHOLE, chooser, temperature) == 4 * 63
