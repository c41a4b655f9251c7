"""The figures of `make bench-depth`: cells, their summary, and the printed form of both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench_depth.measure import Cell
from headway.engine.bench.report import new_console, new_table
from headway.engine.protocol.messages import EngineInfo

# What a chosen depth is to give at least in every cell.
BAR_OF_BEST, BAR_OF_DEPTH_0 = 0.95, 0.98


@dataclass(frozen=True, slots=True)
class Summary:
    """Over all cells. worst, mean: of over_best and over_depth_0, means are geometric. mean_over_fixed: the
    speed at the chosen depth over that of each fixed depth. missed: the bars that cells miss, in words."""

    num_cells: int
    worst_over_best: float
    mean_over_best: float
    worst_over_depth_0: float
    mean_over_depth_0: float
    expected_worst_over_best: float
    expected_mean_over_best: float
    expected_worst_over_depth_0: float
    expected_mean_over_depth_0: float
    mean_over_fixed: list[float]
    missed: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """rates: of acceptance in each stationary profile, by position. left_out: what was asked for and does not
    fit. summary: None where no cell fits. seconds: of all measurements."""

    command: str
    versions: dict[str, str]
    device_name: str
    engine: EngineInfo
    rates: dict[str, tuple[float, ...]]
    seconds: float
    cells: list[Cell]
    summary: Summary | None
    left_out: list[str]


def summarize(cells: Sequence[Cell]) -> Summary | None:
    """Returns None where there is no cell."""
    if not cells:
        return None
    over_best, over_depth_0 = [cell.over_best for cell in cells], [cell.over_depth_0 for cell in cells]
    expected_best = [cell.expected_over_best for cell in cells]
    expected_depth_0 = [cell.expected_over_depth_0 for cell in cells]
    auto = [cell.auto.tokens_per_second for cell in cells]
    by_depth = zip(*([speed.tokens_per_second for speed in cell.fixed] for cell in cells), strict=True)
    return Summary(
        len(cells),
        min(over_best),
        statistics.geometric_mean(over_best),
        min(over_depth_0),
        statistics.geometric_mean(over_depth_0),
        min(expected_best),
        statistics.geometric_mean(expected_best),
        min(expected_depth_0),
        statistics.geometric_mean(expected_depth_0),
        mean_over_fixed=[
            statistics.geometric_mean(a / b for a, b in zip(auto, fixed, strict=True)) for fixed in by_depth
        ],
        missed=_missed(cells),
    )


def _missed(cells: Sequence[Cell]) -> list[str]:
    found = []
    for cell in cells:
        if cell.over_best < BAR_OF_BEST:
            found.append(
                f"{cell.name}: {cell.over_best:.3f} of the best fixed depth, the bar is {BAR_OF_BEST}"
            )
        if cell.over_depth_0 < BAR_OF_DEPTH_0:
            found.append(f"{cell.name}: {cell.over_depth_0:.3f} of depth 0, the bar is {BAR_OF_DEPTH_0}")
    return found


def show(report: Report) -> None:
    console = new_console()
    info = report.engine
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.command}\n{report.device_name}, {versions}")
    console.print(f"{info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters, {info.dtype}")
    told = "; ".join(f"{name} {'/'.join(f'{r:.3g}' for r in rates)}" for name, rates in report.rates.items())
    console.print(f"drafts are accepted at set rates by position, so that the text means nothing: {told}")
    if report.summary is not None:
        console.print(_cell_table(report.cells))
        _show_summary(report.summary)
    for reason in report.left_out:
        console.print(f"left out: {reason}")
    console.print(f"measured in {report.seconds:,.0f} s")


def _cell_table(cells: Sequence[Cell]) -> Table:
    depths = range(len(cells[0].fixed))
    table = new_table(
        "streams", "prompt", "profile", "mean depth", "rounds by depth", "tokens/s auto",
        *(f"depth {depth}" for depth in depths), "best", "auto / best", "auto / depth 0",
    )  # fmt: skip
    for cell in cells:
        table.add_row(
            f"{cell.streams}",
            f"{cell.input_len:,}",
            cell.profile,
            f"{cell.mean_depth:.2f}",
            " ".join(f"{share:.0%}" for share in cell.shares),
            *(f"{speed.tokens_per_second:,.0f}" for speed in (cell.auto, *cell.fixed)),
            f"{cell.best_depth}",
            f"{cell.over_best:.3f}",
            f"{cell.over_depth_0:.3f}",
        )
    return table


def _show_summary(summary: Summary) -> None:
    table = new_table(
        f"{summary.num_cells} cells", "worst", "geometric mean", "worst expected", "mean expected"
    )
    table.add_row(
        "auto / best",
        f"{summary.worst_over_best:.3f}",
        f"{summary.mean_over_best:.3f}",
        f"{summary.expected_worst_over_best:.3f}",
        f"{summary.expected_mean_over_best:.3f}",
    )
    table.add_row(
        "auto / depth 0",
        f"{summary.worst_over_depth_0:.3f}",
        f"{summary.mean_over_depth_0:.3f}",
        f"{summary.expected_worst_over_depth_0:.3f}",
        f"{summary.expected_mean_over_depth_0:.3f}",
    )
    console = new_console()
    console.print(table)
    told = ", ".join(f"{ratio:.3f} of depth {depth}" for depth, ratio in enumerate(summary.mean_over_fixed))
    console.print(f"auto over the whole grid, geometric mean: {told}")
    for line in summary.missed:
        console.print(f"missed: {line}")
    if not summary.missed:
        console.print(f"every cell has {BAR_OF_BEST} of the best fixed depth and {BAR_OF_DEPTH_0} of depth 0")
