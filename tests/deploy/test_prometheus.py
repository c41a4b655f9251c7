"""A real Prometheus scrapes a running daemon: every rule and every panel of the dashboard has data."""

from __future__ import annotations

import math
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from headway_testing.daemon import Server
from headway_testing.prometheus import RULES, Prometheus, is_of_fleets, panel_queries, rules, selectors
from headway_testing.tools import installed

KINDS = ("stream", "whole", "abort", "chat", "refused", "no drafts", "stream")
NUM_ROUNDS = 3  # of all kinds, with a scrape after each: rates need two scrapes that differ


def promtool(*arguments: str | Path, standard_input: str | None = None) -> str:
    command = [installed("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=standard_input, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def send(url: str, kind: str) -> None:
    """One request of a kind; what comes back is told by the metrics."""
    body: dict[str, Any] = {"prompt": "def parse(text):\n", "max_tokens": 24, "temperature": 0.5}
    if kind == "stream":
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as response:
            response.read()
    elif kind == "abort":
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as response:
            next(response.iter_lines())
    elif kind == "chat":
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24}
        httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
    elif kind == "refused":
        httpx.post(f"{url}/v1/completions", json=body | {"temperature": 9}, timeout=60)
    elif kind == "no drafts":
        httpx.post(f"{url}/v1/completions", json=body | {"speculation": {"max_draft_tokens": 0}}, timeout=60)
    else:
        httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def load(server: Server, running: Prometheus) -> None:
    """All kinds of requests, three at once, between any two scrapes."""
    for _ in range(NUM_ROUNDS):
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda kind: send(server.url, kind), KINDS))
        server.wait_until_idle()
        running.wait_for_scrape()


@pytest.fixture(scope="module")
def prometheus(server: Server, scraping: Prometheus) -> Prometheus:
    """After some load."""
    load(server, scraping)
    return scraping


def test_promtool_accepts_configuration_and_rules() -> None:
    told = promtool("check", "config", RULES / "prometheus.yml")
    assert f"{len(rules('alert'))} rules found" in told
    assert f"{len(rules('record'))} rules found" in told


def test_every_alert_fires_and_resolves() -> None:
    cases = Path(__file__).with_name("rules_test.yml")
    assert "SUCCESS" in promtool("test", "rules", cases)
    tested = {entry["alertname"] for case in yaml.safe_load(cases.read_text())["tests"]
              for entry in case["alert_rule_test"] if entry["exp_alerts"]}  # fmt: skip
    assert tested == {rule["alert"] for rule in rules("alert")}


@pytest.mark.slow
def test_promtool_finds_nothing_wrong_with_the_metrics(server: Server) -> None:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines(keepends=True)
    # To vLLM's names promtool objects: they have colons.
    own = "".join(line for line in lines if "vllm:" not in line)
    assert own.count("\n# TYPE headway_") > 20
    assert promtool("check", "metrics", standard_input=own) == ""


@pytest.mark.slow
def test_every_recording_rule_has_data_under_load(prometheus: Prometheus) -> None:
    found = {rule["record"]: prometheus.query(rule["record"]) for rule in rules("record")}
    assert {name: values for name, values in found.items() if not values} == {}
    unmeasured = [name for name, values in found.items() if any(math.isnan(value) for _, value in values)]
    assert unmeasured == []


@pytest.mark.slow
def test_everything_that_an_alert_reads_is_there(prometheus: Prometheus) -> None:
    read = {selector for rule in rules("alert") for selector in selectors(rule["expr"])}
    read = {selector for selector in read if not is_of_fleets(selector)}  # tests/fleet has these
    assert len(read) > 8
    assert all(selector.startswith(("headway_", "headway:", "up", "process_")) for selector in read), read
    assert [selector for selector in sorted(read) if not prometheus.query(selector)] == []


@pytest.mark.slow
def test_prometheus_evaluates_all_rules_and_none_alerts(prometheus: Prometheus) -> None:
    found = prometheus.rules()
    assert len(found) == len(rules("record")) + len(rules("alert"))
    assert [(rule["name"], rule.get("lastError")) for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule.get("state", "inactive") == "firing"] == []


@pytest.mark.slow
def test_every_panel_has_data_under_load(prometheus: Prometheus) -> None:
    queries = [(title, query) for title, query in panel_queries() if not is_of_fleets(query)]
    assert len(queries) > 30
    assert not any("vllm:" in expression for _, expression in queries)  # which a server has only if asked
    found = {title: prometheus.query(expression) for title, expression in queries}
    assert {title for title, values in found.items() if not values} == set()
    assert {title for title, values in found.items() if any(math.isnan(v) for _, v in values)} == set()


@pytest.mark.slow
def test_prometheus_counted_what_was_sent(prometheus: Prometheus, server: Server) -> None:
    """The load's kinds are all there, and the last scrape holds what the daemon says."""
    prometheus.wait_for_scrape()
    ended = {labels["reason"]: value for labels, value in prometheus.query("headway_requests_finished_total")}
    assert ended["length"] + ended["stop"] > 0
    assert ended["abort"] > 0
    assert ended["error"] == 0
    for labels, value in prometheus.query('headway_http_responses_total{endpoint!="other"}'):
        told = {name: labels[name] for name in ("endpoint", "status")}
        assert value == server.metric("headway_http_responses_total", **told)
