"""Computes the figures of a level from its outcomes: latencies, throughput and the effect of speculation."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.server.bench.client import Outcome, ShareResult

PERCENTILES = (50, 90, 99)
GAP_PERCENTILES = (*PERCENTILES, 99.9)


@dataclass(frozen=True, slots=True)
class Level:
    """One load: a closed loop of N streams, or N arrivals per second."""

    num_streams: int
    request_rate: float | None

    def __str__(self) -> str:
        if self.request_rate is not None:
            return f"{self.request_rate:g} requests/s"
        return f"{self.num_streams} stream{'s' * (self.num_streams > 1)}"


@dataclass(frozen=True, slots=True)
class References:
    """The results of other runs at the same level; None if there is no such run.

    plain_milliseconds: median time per output token without speculation. engine_tokens_per_second: of the
    same closed loop without HTTP.
    """

    plain_milliseconds: float | None = None
    engine_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of one level. Latencies in milliseconds by percentile, empty where nothing was measured.

    tokens_per_second: output, from the first request's start to the last one's end. time_per_output_token:
    (end to end - time to first token) / (tokens - 1). acceptance_length: tokens a row got in a round, by the
    usage of the answers; engine_acceptance_length, acceptance_per_position: the same by /metrics, over all
    requests of that time. conversion: speed-up of the median time per output token over a run without
    speculation, over the acceptance length. share_of_engine: tokens a second over those of the engine alone.
    client_cpu_share: processor time over time, of the busiest worker.
    """

    level: str
    num_requests: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    time_to_first_token: dict[str, float]
    time_per_output_token: dict[str, float]
    chunk_gap: dict[str, float]
    end_to_end: dict[str, float]
    tokens_per_chunk: float | None
    acceptance_length: float | None
    engine_acceptance_length: float | None
    acceptance_per_position: list[float]
    conversion: float | None
    share_of_engine: float | None
    errors: dict[str, int]
    num_workers: int
    client_cpu_share: float


def figures_of(
    level: Level,
    results: Sequence[ShareResult],
    before: Mapping[str, float],
    after: Mapping[str, float],
    references: References,
) -> Figures:
    """before, after: samples of /metrics, empty if there are none."""
    outcomes = [outcome for result in results for outcome in result.outcomes]
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.num_chunks > 0]
    start = min((outcome.start for outcome in outcomes), default=0.0)
    seconds = max((outcome.end for outcome in outcomes), default=0.0) - start
    tokens = sum(outcome.completion_tokens for outcome in good)
    rate = tokens / seconds if seconds > 0 else 0.0
    long = [outcome for outcome in good if outcome.completion_tokens > 1]
    per_token = percentiles([(o.end - o.first) / (o.completion_tokens - 1) for o in long])
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    own_length = _own_acceptance_length(long)
    engine_length = _engine_acceptance_length(changes)
    engine_rate = references.engine_tokens_per_second
    return Figures(
        level=str(level),
        num_requests=len(outcomes),
        seconds=seconds,
        tokens_per_second=rate,
        requests_per_second=len(good) / seconds if seconds > 0 else 0.0,
        time_to_first_token=percentiles([outcome.first - outcome.start for outcome in good]),
        time_per_output_token=per_token,
        chunk_gap=percentiles([gap for outcome in good for gap in outcome.gaps], GAP_PERCENTILES),
        end_to_end=percentiles([outcome.end - outcome.start for outcome in good]),
        tokens_per_chunk=tokens / sum(outcome.num_chunks for outcome in good) if good else None,
        acceptance_length=own_length,
        engine_acceptance_length=engine_length,
        acceptance_per_position=_acceptance_per_position(changes),
        conversion=_conversion(
            references.plain_milliseconds, per_token.get("p50"), engine_length or own_length
        ),
        share_of_engine=rate / engine_rate if engine_rate is not None else None,
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        num_workers=len(results),
        client_cpu_share=max(
            (r.cpu_seconds / r.wall_seconds for r in results if r.wall_seconds > 0), default=0.0
        ),
    )


def percentiles(seconds: Sequence[float], percents: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Returns percentiles in milliseconds; {} for an empty sequence. percents: multiples of 0.1."""
    if not seconds:
        return {}
    if len(seconds) == 1:
        return {f"p{percent}": 1e3 * seconds[0] for percent in percents}
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    return {f"p{percent}": 1e3 * cuts[round(10 * percent) - 1] for percent in percents}


def _own_acceptance_length(outcomes: Sequence[Outcome]) -> float | None:
    """Returns the tokens a row got in a round: each token after the first comes from a round, and each
    round ends with one token that is no draft."""
    num_tokens = sum(outcome.completion_tokens - 1 for outcome in outcomes)
    num_rounds = num_tokens - sum(outcome.accepted_tokens for outcome in outcomes)
    return num_tokens / num_rounds if num_rounds > 0 else None


def _engine_acceptance_length(changes: Mapping[str, float]) -> float | None:
    num_rounds = changes.get("headway_tokens_per_round_count", 0.0)
    return changes["headway_tokens_per_round_sum"] / num_rounds if num_rounds > 0 else None


def _acceptance_per_position(changes: Mapping[str, float]) -> list[float]:
    name = 'headway_spec_decode_num_{}_tokens_per_pos_total{{position="{}"}}'
    shares: list[float] = []
    while drafted := changes.get(name.format("draft", len(shares) + 1), 0.0):
        shares.append(changes[name.format("accepted", len(shares) + 1)] / drafted)
    return shares


def _conversion(plain: float | None, milliseconds: float | None, length: float | None) -> float | None:
    return None if plain is None or milliseconds is None or length is None else plain / milliseconds / length
