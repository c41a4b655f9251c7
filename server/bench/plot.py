"""Throughput over latency, as a picture. matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.server.bench.figures import Figures

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment, misc]

CAN_PLOT = Figure is not None


def plot(levels: Sequence[Figures], file: Path, title: str) -> None:
    """One point a level: output tokens a second over the median time per output token."""
    shown = [level for level in levels if level.time_per_output_token]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    latencies = [level.time_per_output_token["p50"] for level in shown]
    axes.plot(latencies, [level.tokens_per_second for level in shown], marker="o")
    for level, latency in zip(shown, latencies, strict=True):
        axes.annotate(
            level.level, (latency, level.tokens_per_second), textcoords="offset points", xytext=(6, -10)
        )
    axes.set_xlabel("time per output token, median, ms")
    axes.set_ylabel("output tokens a second")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(file, dpi=150)
