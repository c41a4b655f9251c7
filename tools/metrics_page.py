"""Writes docs/metrics.md from the code of the metrics (`make docs`). A test keeps the page up to date."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.metrics_core import Metric

from headway.engine import EngineStats
from headway.server.telemetry.metrics import Metrics

PAGE = Path(__file__).parents[1] / "docs/metrics.md"
INTRODUCTION = """\
# Metrics

`GET /metrics` returns these metrics in Prometheus' text format, without a key. `make docs` writes this page from the code.
The API process has one registry; the engine sends it snapshots, at most ten a second. Counters continue after
a restart of the engine, and all their labels exist from the start. The `process_*` metrics are those of the API process.
A label's values are in braces; `position` goes from 1 to the server's depth.

`deploy/prometheus/recording.rules.yml` has ratios to plot, `deploy/grafana` panels, and
[the runbook](runbook.md) explains the alerts. `--metrics-names vllm` replaces the names by those of vLLM,
and `both` exports both: see [below](#vllms-names).

| metric | kind | unit | meaning |
|---|---|---|---|
"""
VLLM = """
## vLLM's names

With `--metrics-names vllm` or `both` names, labels and meanings are those of vLLM 0.33, so its Grafana dashboards,
autoscaler rules and gateways that read them, and the acceptance section of `vllm bench serve` work unchanged. Panels
for features that Headway does not have, such as LoRA adapters and KV connectors, stay empty.
`model_name` is the served model's name, `engine` is always `0`. Two things differ: the histograms have Headway's
buckets, and latencies of a choice are observed when it ends, except the inter-token latency.
Headway's own dashboard, rules and benchmark client read Headway's names: if you use them, set `both`.
An engine of depth 0 has no `vllm:spec_decode` families, as in vLLM.

A Gateway API inference extension picks endpoints by `num_requests_waiting`, `num_requests_running`,
`kv_cache_usage_perc` and the labels of `cache_config_info`; their Headway names work as well, as in
`deploy/kubernetes/inference-gateway.yaml`.

| metric | kind | meaning |
|---|---|---|
"""
# The unit of a metric by a word of its name; the last matching row wins.
UNITS = {
    "restarts": "restarts", "state": "0 or 1", "steps": "steps", "responses": "answers", "errors": "errors", "requests": "requests",
    "preemptions": "times", "nan": "requests", "rows": "rows", "replays": "rounds", "drafts": "windows", "depth": "drafts", "length": "tokens", "fds": "files",
    "keywords": "keywords", "tokens": "tokens", "blocks": "blocks", "ratio": "0 to 1", "bytes": "bytes", "seconds": "seconds", "server": "",
    "choices": "choices", "config": "", "grammars": "grammars", "calls": "calls", "audits": "requests", "speedup": "ratio",
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
