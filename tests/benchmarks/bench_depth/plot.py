"""Heat maps of the grid: the depth that is chosen, and what it gives of the best fixed depth. Needs
matplotlib, an optional extra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench_depth.report import CellFigures

# The colours of ratios are told apart from here to 1.
LEAST_RATIO = 0.9


def plot(cells: Sequence[CellFigures], file: Path, title: str, max_depth: int) -> None:
    """One column for each profile: above the mean depth, below the speed over that of the best fixed depth,
    without luck."""
    profiles = list(dict.fromkeys(cell.profile for cell in cells))
    streams = sorted({cell.streams for cell in cells})
    contexts = sorted({cell.input_len for cell in cells})
    width = max(2.4, 0.55 * len(streams)) * len(profiles) + 2
    figure = Figure(figsize=(width, 2.4 + 1.1 * len(contexts)), layout="constrained")
    axes = figure.subplots(2, len(profiles), squeeze=False)
    rows: tuple[tuple[str, Callable[[CellFigures], float], tuple[float, float], str], ...] = (
        ("mean depth", lambda cell: cell.mean_depth, (0, max_depth), "viridis"),
        ("auto / best fixed", lambda cell: cell.expected_to_best, (LEAST_RATIO, 1), "RdYlGn"),
    )
    for line, (label, value, limits, colours) in zip(axes, rows, strict=True):
        image = None
        for profile, panel in zip(profiles, line, strict=True):
            found = {(c.input_len, c.streams): value(c) for c in cells if c.profile == profile}
            grid = [[found.get((context, n), float("nan")) for n in streams] for context in contexts]
            image = panel.imshow(grid, vmin=limits[0], vmax=limits[1], cmap=colours, aspect="auto")
            _label(panel, grid, [f"{n}" for n in streams], [f"{context:,}" for context in contexts])
            panel.set_title(profile)
        line[0].set_ylabel("prompt tokens")
        assert image is not None, "there is no profile"
        figure.colorbar(image, ax=list(line), label=label)
    for panel in axes[1]:
        panel.set_xlabel("streams")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(file, dpi=150)


def _label(panel: Axes, grid: Sequence[Sequence[float]], columns: Sequence[str], rows: Sequence[str]) -> None:
    """Names rows and columns and writes each value; a cell that was not measured stays empty."""
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if not math.isnan(value):  # that was measured
                text = panel.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="x-small")
                text.set_bbox({"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 1})
