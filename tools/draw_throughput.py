"""Draws docs/throughput.svg from docs/results.json: python tools/draw_throughput.py. Needs matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLOURS = {"Headway": "#1f6feb", "vLLM": "#8b949e"}


def main() -> None:
    results = json.loads((DOCS / "results.json").read_text())
    streams = results["streams"]
    matplotlib.rcParams |= {"svg.hashsalt": "headway", "font.size": 10}
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for name, values in results["tokens_per_second"].items():
        colour = COLOURS[name.split(",")[0]]
        style = "-" if "3 drafts" in name else "--"
        axes.plot(streams, values, style, marker="o", color=colour, label=name)
    floor = [1000 * n / ms for n, ms in zip(streams, results["floor"]["milliseconds_per_step"], strict=True)]
    axes.plot(streams, floor, ":", color="#cf222e", label="floor of memory reads, no drafts")
    axes.set(xscale="log", yscale="log", xlabel="streams", ylabel="output tokens/s")
    axes.set_xticks(streams, [str(n) for n in streams])
    axes.minorticks_off()
    axes.set_title(f"{results['card']}, {results['peer']}, commit {results['commit']}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "throughput.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
