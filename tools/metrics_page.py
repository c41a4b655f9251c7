"""Writes docs/metrics.md from the metrics themselves: `make docs`. A test holds the page to it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics_core import Metric

from headway.engine import EngineStats
from headway.server.telemetry.metrics import Metrics

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
INTRODUCTION = """\
# Metrics

What `GET /metrics` shows, in Prometheus' text format; written by `make docs` from the code. Needs no key.
One registry, in the API process; the engine sends snapshots, at most ten a second. Counters go on over
restarts of the engine, and all their labels are there from the start. `process_*` are those of the API process.
A label's values are in braces; `position` goes from 1 to the server's depth.

Ratios to plot are in `deploy/prometheus/recording.rules.yml`, panels in `deploy/grafana`, alerts in
[the runbook](runbook.md). `--metrics-names vllm` shows the families under the names that vLLM gives
them instead, and `both` shows them under both names: see [below](#vllms-names).

| metric | kind | unit | what it says |
|---|---|---|---|
"""
VLLM = """
## vLLM's names

With `--metrics-names vllm` or `both`. Names, labels and meanings are those of vLLM 0.33, so its Grafana boards,
autoscaler rules and gateways that read them, and the acceptance section of `vllm bench serve` work unchanged. Panels
about what Headway does not have, such as LoRA adapters and KV connectors, stay empty.
`model_name` is the served model's name, `engine` is always `0`. Two things differ: the bounds of the buckets are
Headway's, and latencies of a choice are observed when it ends, those between two pieces of its output excepted.
Headway's own dashboard, rules and benchmark client read Headway's names: where they are used, take `both`.
An engine of depth 0 shows no `vllm:spec_decode` families, as with vLLM.

A Gateway API inference extension picks endpoints by `num_requests_waiting`, `num_requests_running`,
`kv_cache_usage_perc` and the labels of `cache_config_info`; their Headway names serve as well, as in
`deploy/kubernetes/inference-gateway.yaml`.

| metric | kind | what it says |
|---|---|---|
"""
# By a word of the name; the last that fits.
UNITS = {
    "restarts": "restarts", "state": "0 or 1", "steps": "steps", "responses": "answers", "errors": "errors", "requests": "requests",
    "preemptions": "times", "nan": "requests", "rows": "rows", "replays": "rounds", "drafts": "windows", "depth": "drafts", "length": "tokens", "fds": "files",
    "keywords": "keywords", "tokens": "tokens", "blocks": "blocks", "ratio": "0 to 1", "bytes": "bytes", "seconds": "seconds", "server": "",
    "choices": "choices", "config": "", "grammars": "grammars", "calls": "calls", "audits": "requests", "band": "0 or 1",
}  # fmt: skip


def page() -> str:
    stats = EngineStats(num_kv_blocks=1, draft_tokens_per_position=[0], accepted_tokens_per_position=[0])
    families = sorted(
        Metrics(lambda: stats, lambda: 0, names="both").families(), key=lambda family: family.name
    )
    own = [_row(family, _unit(family)) for family in families if not family.name.startswith("vllm:")]
    vllm = [_row(family) for family in families if family.name.startswith("vllm:")]
    return "".join([INTRODUCTION, *own, VLLM, *vllm])


def _row(family: Metric, *unit: str) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    cells = [f"`{family.name}{suffix}`{_labels(family)}", family.type, *unit, family.documentation]
    return f"| {' | '.join(cells)} |\n"


def _labels(family: Metric) -> str:
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if value not in values.setdefault(label, []):
                values[label].append(value)
    for label in ("le", "model_name", "engine"):
        values.pop(label, None)
    if "position" in values or family.type == "info" or family.name.endswith("_info"):
        values = {label: [] for label in values}
    return "".join(
        f"<br>{label} {{{', '.join(seen)}}}" if seen else f"<br>{label}" for label, seen in values.items()
    )


def _unit(family: Metric) -> str:
    words = family.name.split("_")
    return [unit for word, unit in UNITS.items() if word in words][-1]


if __name__ == "__main__":
    PAGE.write_text(page())
