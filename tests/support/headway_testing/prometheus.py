"""A real Prometheus that scrapes what its configuration names, for tests of any folder."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import yaml

from headway_testing.daemon import get_plain
from headway_testing.ports import free_port
from headway_testing.tools import installed
from headway_testing.waiting import wait_until

RULES = Path(__file__).parents[3] / "deploy/prometheus"
DASHBOARD = RULES.parent / "grafana/headway.json"
Sample = tuple[dict[str, str], float]


def rules(kind: str) -> list[dict[str, Any]]:
    """Returns rules of a kind: record or alert."""
    files = sorted(RULES.glob("*.rules.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Returns (title and legend, expression) of every target, its variables set to all."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$job", ".+").replace("$instance", ".+")
            assert "$" not in expression
            yield f"{panel['title']}: {target.get('legendFormat', '')}", expression


def is_of_fleets(expression: str) -> bool:
    """Tells whether the expression reads what only a fleet shows."""
    return "headway_fleet_" in expression or "replica!=" in expression


def selectors(expression: str) -> Iterator[str]:
    """Returns those of every series that the expression reads, without ranges: `a{b="c"}`."""
    todo: list[Any] = [promql_parser.parse(expression)]
    while todo:
        node = todo.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node.prettify()
        for name in ("lhs", "rhs", "expr", "vector_selector"):
            todo += [child] if (child := getattr(node, name, None)) is not None else []
        todo += getattr(node, "args", [])


class Prometheus:
    """A running Prometheus, queried over its API. num_targets: how many it scrapes."""

    def __init__(self, url: str, num_targets: int) -> None:
        self.url = url
        self._num_targets = num_targets

    def wait_for_scrape(self, seconds: float = 60.0) -> None:
        """Waits until every target was scraped, and after that every rule evaluated, from now on. Prometheus
        begins to scrape some seconds after it says that it is ready."""
        begun = time.time()
        wait_until(
            lambda: self._num_scraped_since(begun) == self._num_targets,
            seconds,
            "not every target was scraped",
        )
        scraped = time.time()
        wait_until(
            lambda: all(when > scraped for when in self._evaluated()), seconds, "not every rule was evaluated"
        )

    def _num_scraped_since(self, begun: float) -> int:
        return sum(value > begun for _, value in self.query("timestamp(up == 1)"))

    def _evaluated(self) -> list[float]:
        """Returns when each group of rules was evaluated, in seconds since the epoch."""
        return [datetime.fromisoformat(group["lastEvaluation"]).timestamp() for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the groups of rules, as the API has them."""
        groups: list[dict[str, Any]] = get_plain(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        return groups

    def query(self, expression: str) -> list[Sample]:
        answer = get_plain(f"{self.url}/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        return [(entry["metric"], float(entry["value"][1])) for entry in answer["data"]["result"]]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._groups() for rule in group["rules"]]


def running_prometheus(folder: Path, config: Mapping[str, Any]) -> Iterator[Prometheus]:
    """Yields Prometheus once it has scraped every target. folder: an empty one, for its configuration and its
    data."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            installed("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}", "--log.level=warn",
        ]
    )  # fmt: skip
    static = [entry for job in config["scrape_configs"] for entry in job["static_configs"]]
    running = Prometheus(f"http://{address}", sum(len(entry["targets"]) for entry in static))

    def is_ready() -> bool:
        assert process.poll() is None, f"Prometheus left with {process.returncode}"
        with suppress(httpx.TransportError):
            return get_plain(f"{running.url}/-/ready").status_code == 200
        return False

    try:
        wait_until(is_ready, 120, "Prometheus did not become ready")
        running.wait_for_scrape()
        yield running
    finally:
        process.terminate()
        process.wait(timeout=30)
