"""`headway fleet status`: the load of each replica of a running fleet, from the fleet's /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headway.engine import HeadwayError
from headway.server.cli.console import show
from headway.server.fleet.metrics import REPLICA, ROUTED, STATES

SECONDS = 15.0
COLUMNS = ("REPLICA", "MODEL", "STATE", "RUNNING", "WAITING", "KV CACHE", "REQUESTS")


class StatusError(HeadwayError):
    """There is no fleet at the address."""


def status(url: str) -> int:
    """Shows a line for each replica. Returns the exit status, 1 if none serves. Raises StatusError."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=SECONDS).raise_for_status()
        samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        ValueError,
    ) as error:  # a text that is not in Prometheus' format raises ValueError
        raise StatusError(f"no fleet answers at {url}: {error}") from None
    states = [sample for sample in samples if sample.name == STATES]
    if not states:
        raise StatusError(f"{url} is one server and no fleet; {url}/load tells what it has to do")
    counts = [f"{sample.value:.0f} {sample.labels['state']}" for sample in states if sample.value]
    show(f"{url}: {', '.join(counts) or 'no replica'}\n")
    names = sorted({sample.labels[REPLICA] for sample in samples if REPLICA in sample.labels})
    rows = [_row(name, [s for s in samples if s.labels.get(REPLICA) == name]) for name in names]
    if rows:
        show(_table([COLUMNS, *rows]))
    return 0 if any(row[COLUMNS.index("STATE")] == "serving" for row in rows) else 1


def _row(name: str, samples: Iterable[Sample]) -> Sequence[str]:
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.name, []).append(sample)

    def value(metric: str, form: str) -> str:
        return "".join(format(sample.value, form) for sample in found.get(metric, []))

    return (
        name,
        "".join(s.labels["model"] for s in found.get("headway_server_info", [])),
        "".join(s.labels["state"] for s in found.get("headway_engine_state", []) if s.value),
        value("headway_num_requests_running", ".0f"),
        value("headway_num_requests_waiting", ".0f"),
        value("headway_kv_cache_usage_ratio", ".0%"),
        ", ".join(f"{s.labels['reason']} {s.value:.0f}" for s in found.get(ROUTED, []) if s.value),
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
