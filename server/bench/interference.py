"""Measures how much long prompts slow down streams, and streams long prompts: `headway bench serve
--prompt-every`."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from headway.server.bench.client import Outcome, Prompts, Share, ShareResult
from headway.server.bench.figures import Figures, Level, References
from headway.server.bench.run import Run

NUM_ALONE = 5


@dataclass(frozen=True, slots=True)
class LongPrompts:
    """The load of long prompts: num_tokens random tokens at a fixed interval, each answered with one
    token."""

    num_tokens: int
    every_seconds: float


@dataclass(frozen=True, slots=True)
class Interference:
    """The results of one closed loop without and with concurrent long prompts. None if no request succeeded.

    chunk_gap_ratio: the 99th percentile of the streams' gaps with prompts over the one without.
    tokens_per_second: the median of a prompt's tokens over its time to first token; prefill_share: this rate
    with the streams over the rate alone.
    """

    level: str
    prompt_len: int
    every_seconds: float
    num_prompts: int
    chunk_gap_ratio: float | None
    tokens_per_second_alone: float | None
    tokens_per_second: float | None
    prefill_share: float | None
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class Compared:
    """The streams' figures without and with concurrent prompts, and the ratios derived from them."""

    undisturbed: Figures
    beside: Figures
    interference: Interference


def compare(run: Run, level: Level, prompts: LongPrompts, references: References) -> Compared:
    """Measures the prompts alone, the streams alone, then both for the same time. Raises httpx.HTTPError."""
    run.spread(_one_by_one(run, prompts, f"{level}, prompt to warm up", 1))
    alone = _outcomes(run.spread(_one_by_one(run, prompts, f"{level}, prompts alone", NUM_ALONE)))
    undisturbed = run.measure(level, references)
    arriving = dataclasses.replace(
        _one_by_one(run, prompts, f"{level}, prompts beside", None),
        request_rate=1 / prompts.every_seconds,
        has_even_arrivals=True,
        seconds=run.seconds,
    )
    beside, results = run.measure_beside(level, references, [arriving])
    name = f"{level}, {prompts.num_tokens:,} tokens every {prompts.every_seconds:g} s"
    beside = dataclasses.replace(beside, level=name)
    found = interference_of(prompts, undisturbed, beside, alone=alone, arrived=_outcomes(results))
    return Compared(undisturbed, beside, found)


def interference_of(
    prompts: LongPrompts,
    undisturbed: Figures,
    beside: Figures,
    *,
    alone: Sequence[Outcome],
    arrived: Sequence[Outcome],
) -> Interference:
    """alone, arrived: the outcomes of the prompts without and with streams."""
    before, after = (figures.chunk_gap.get("p99") for figures in (undisturbed, beside))
    rate_alone, rate = (_tokens_per_second(prompts, outcomes) for outcomes in (alone, arrived))
    errors = Counter(o.error for o in (*alone, *arrived) if o.error is not None)
    return Interference(
        level=undisturbed.level,
        prompt_len=prompts.num_tokens,
        every_seconds=prompts.every_seconds,
        num_prompts=len(arrived),
        chunk_gap_ratio=after / before if before and after else None,
        tokens_per_second_alone=rate_alone,
        tokens_per_second=rate,
        prefill_share=rate / rate_alone if rate and rate_alone else None,
        errors=dict(errors),
    )


def _tokens_per_second(prompts: LongPrompts, outcomes: Sequence[Outcome]) -> float | None:
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.num_chunks > 0]
    if not good:
        return None
    return prompts.num_tokens / statistics.median(outcome.first - outcome.start for outcome in good)


def _one_by_one(run: Run, prompts: LongPrompts, seed: str, num_requests: int | None) -> Share:
    return dataclasses.replace(
        run.load(Level(1, None)),
        target=dataclasses.replace(run.target, body=run.target.body | {"max_tokens": 1}),
        prompts=Prompts(prompts.num_tokens, run.prompts.vocab_size),
        seed=f"{run.seed}, {seed}",
        num_requests=num_requests,
        seconds=None,
    )


def _outcomes(results: Sequence[ShareResult]) -> list[Outcome]:
    return [outcome for result in results for outcome in result.outcomes]
