"""Shows the result of `headway bench exact`, on the terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from headway.engine.bench.exact.check import Coverage
from headway.engine.bench.exact.combinations import Combination, Trial
from headway.engine.bench.exact.compare import Difference
from headway.engine.bench.exact.soak import SoakOutcome
from headway.engine.bench.report import new_console
from headway.engine.protocol.messages import EngineInfo

MAX_KEPT_DIFFERENCES = 200
TABLE_WIDTH = 120
FACTORS: dict[str, Callable[[Combination], str]] = {
    "depth": lambda c: f"{c.depth}",
    "company": lambda c: "alone" if c.company == 1 else f"{c.company} at once",
    "prompt chunks": lambda c: "engine's own" if c.chunk is None else f"{c.chunk}",
    "prefix cache": lambda c: "warm" if c.is_warm else "cold",
    "preemption": lambda c: "preempted" if c.is_preempted else "none",
    "sampling": lambda c: "greedy" if c.is_greedy else "temperature 0.8",
}


@dataclass(frozen=True, slots=True)
class Level:
    """Requests of one value of one factor, and how many of them differ from their references."""

    factor: str
    value: str
    num_requests: int
    num_differing: int


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a run. num_combinations: the number of drawn ones, each at least least_draws times.
    differences: the first MAX_KEPT_DIFFERENCES, in the order in which they were found."""

    command: str
    device_name: str
    engine: EngineInfo
    drafter: str
    num_requests: int
    num_texts: int
    num_combinations: int
    least_draws: int
    num_differing: int
    levels: list[Level]
    coverage: Coverage
    differences: list[Difference]
    soak: SoakOutcome | None
    seconds: dict[str, float]

    @property
    def is_exact(self) -> bool:
        return self.num_differing == 0 and (self.soak is None or self.soak.num_differing == 0)


def levels_of(
    trials: Sequence[Trial], differing: set[int], scored: set[int], restarted: set[int], second_engine: str
) -> list[Level]:
    """Returns the counts by factor; "compared" says at which tokens log-probabilities are compared."""
    levels: list[Level] = []
    factors = {name: [value(trial.combination) for trial in trials] for name, value in FACTORS.items()}
    every = "log-probabilities of each token"
    one = "tokens, then log-probabilities of one"
    factors["compared"] = [every if trial.index in scored else one for trial in trials]
    own = "that of the references"
    factors["engine"] = [second_engine if trial.index in restarted else own for trial in trials]
    for name, values in factors.items():
        counts = Counter(values)
        bad = Counter(value for trial, value in zip(trials, values, strict=True) if trial.index in differing)
        levels += [Level(name, value, counts[value], bad[value]) for value in sorted(counts)]
    return levels


def show(report: Report) -> None:
    console = new_console(TABLE_WIDTH)
    info = report.engine
    console.print(f"{report.command}\n{report.device_name}; {info.architecture}, {info.dtype}", markup=False)
    console.print(", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in report.seconds.items()))
    if report.num_requests:
        _show_trials(console, report)
    if report.soak is not None:
        _show_soak(console, report.soak)
    verdict = "exact: no request differs" if report.is_exact else "NOT EXACT: some requests differ"
    console.print(verdict)


def _show_trials(console: Console, report: Report) -> None:
    coverage = report.coverage
    table = Table()
    for column in ("factor", "value", "requests", "differing"):
        table.add_column(column, justify="right" if column in ("requests", "differing") else "left")
    for level in report.levels:
        table.add_row(level.factor, level.value, f"{level.num_requests:,}", f"{level.num_differing:,}")
    console.print(table)
    share = coverage.num_accepted / max(coverage.num_drafted, 1)
    console.print(
        f"{report.num_combinations} combinations, each drawn {report.least_draws} times or more; "
        f"{report.num_texts:,} texts; {coverage.num_tokens:,} tokens compared, {coverage.num_scored:,} of them with "
        f"log-probabilities, {coverage.num_probes:,} requests by one token behind their cache, too\n"
        f"{coverage.num_preempted:,} requests preempted, {coverage.num_warm_hits:,} found a cached prefix; drafts by "
        f"{report.drafter}: {coverage.num_drafted:,}, accepted {share:.0%}; "
        f"{coverage.num_mixed_steps:,} rounds planned with prompts in their pass, {coverage.num_masked_steps:,} steps with "
        "masked rows"
    )
    console.print(
        f"{report.num_differing:,} of {report.num_requests:,} requests differ from their references"
    )
    if report.differences:
        console.print(f"the first one: {report.differences[0].describe()}", markup=False)


def _show_soak(console: Console, soak: SoakOutcome) -> None:
    first, second = soak.seconds
    console.print(
        f"soak: {soak.num_differing:,} of {soak.num_requests:,} requests differ between two orders of arrival "
        f"({soak.num_tokens:,} tokens, {first:.1f} and {second:.1f} s)"
    )
    if soak.first is not None:
        console.print(f"the first one: {soak.first.describe()}", markup=False)
    elif soak.first_request is not None:
        console.print(f"the first one: request {soak.first_request}, whose first pass is not its run alone")
