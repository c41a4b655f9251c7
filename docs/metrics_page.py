"""Writes docs/metrics.md from the metrics themselves: `make docs`. A test holds the page to it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics_core import Metric

from headway.engine import EngineStats
from headway.server.metrics import Metrics

PAGE = Path(__file__).with_name("metrics.md")
INTRODUCTION = """\
# Metrics

What `GET /metrics` shows, in Prometheus' text format; written by `make docs` from the code. Needs no key.
One registry, in the API process; the engine sends snapshots, at most ten a second. Counters go on over
restarts of the engine, and all their labels are there from the start. `process_*` are those of the API process.
A label's values are in braces; `position` goes from 1 to the server's depth.

Ratios to plot are in `deploy/prometheus/recording.rules.yml`, panels in `deploy/grafana`, alerts in
[the runbook](../deploy/runbook.md).

| metric | kind | unit | what it says |
|---|---|---|---|
"""
# By a word of the name; the last that fits.
UNITS = {
    "restarts": "restarts", "state": "0 or 1", "steps": "steps", "responses": "answers", "requests": "requests",
    "preemptions": "times", "replays": "rounds", "drafts": "windows", "depth": "drafts", "length": "tokens", "fds": "files",
    "tokens": "tokens", "blocks": "blocks", "ratio": "0 to 1", "bytes": "bytes", "seconds": "seconds", "server": "",
}  # fmt: skip


def page() -> str:
    stats = EngineStats(draft_tokens_per_position=[0], accepted_tokens_per_position=[0])
    families = Metrics(lambda: stats, lambda: 0).families()
    return INTRODUCTION + "".join(map(_row, sorted(families, key=lambda family: family.name)))


def _row(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return f"| `{family.name}{suffix}`{_labels(family)} | {family.type} | {_unit(family)} | {family.documentation} |\n"


def _labels(family: Metric) -> str:
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if value not in values.setdefault(label, []):
                values[label].append(value)
    values.pop("le", None)
    if "position" in values or family.type == "info":
        values = {label: [] for label in values}
    return "".join(
        f"<br>{label} {{{', '.join(seen)}}}" if seen else f"<br>{label}" for label, seen in values.items()
    )


def _unit(family: Metric) -> str:
    words = family.name.split("_")
    return [unit for word, unit in UNITS.items() if word in words][-1]


if __name__ == "__main__":
    PAGE.write_text(page())
