"""The metrics of a fleet: all of each server's, told apart, and what `headway fleet status` makes of them."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from headway_testing.tools import installed
from prometheus_client.parser import text_string_to_metric_families

from headway.engine import EngineStats
from headway.server import cli
from headway.server.fleet.metrics import REPLICA, RoutedMetrics, fleet_text
from headway.server.telemetry.metrics import Metrics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text_of(num_running: int, *reasons: str, state: str = "serving") -> bytes:
    """Returns what a replica tells whose requests came for these reasons; the last one is continued."""
    stats = EngineStats(
        num_kv_blocks=10, num_kv_blocks_used=num_running,
        draft_tokens_per_position=[3], accepted_tokens_per_position=[2], num_requests_running=num_running,
    )  # fmt: skip
    server = Metrics(lambda: stats, lambda: 0, read_state=lambda: state, model_name="tiny")  # type: ignore[arg-type,return-value]
    routed = RoutedMetrics()
    for reason in reasons:
        routed.count(reason, is_continued=reason == reasons[-1])
    return server.text() + routed.text()


TEXTS = {"a": text_of(3, "prefix", "prefix", "spilled"), "b": text_of(0, state="restarting")}


def series_of(text: bytes) -> Series:
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, frozenset(s.labels.items())): -1 if math.isnan(s.value) else s.value for s in samples}


def test_every_series_of_each_replica_is_there_once() -> None:
    found = series_of(fleet_text(TEXTS, {}))
    own = frozenset({(REPLICA, "a")}), frozenset({(REPLICA, "b")})
    for text, label in zip(TEXTS.values(), own, strict=True):
        wanted = {(name, labels | label): value for (name, labels), value in series_of(text).items()}
        assert wanted.items() <= found.items()
    assert len(found) == 1 + sum(len(series_of(text)) for text in TEXTS.values())


def test_reasons_are_counted_from_the_start() -> None:
    found = series_of(fleet_text(TEXTS, {}))
    routed = {labels: value for (name, labels), value in found.items() if "routed" in name}
    assert sum(routed.values()) == 3
    assert routed[frozenset({(REPLICA, "a"), ("reason", "prefix")})] == 2
    assert len(routed) == 10
    assert found["headway_fleet_streams_continued_total", frozenset({(REPLICA, "a")})] == 1


@pytest.mark.parametrize(
    ("states", "wanted"),
    [({}, {"running": 0}), ({"RUNNING": 2, "STARTING": 1}, {"running": 2, "starting": 1})],
)
def test_replicas_that_run_are_always_counted(states: dict[str, int], wanted: dict[str, int]) -> None:
    assert series_of(fleet_text({}, states)) == {
        ("headway_fleet_replicas", frozenset({("state", state)})): count for state, count in wanted.items()
    }


def test_promtool_finds_nothing_wrong() -> None:
    command = [installed("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=fleet_text(TEXTS, {"RUNNING": 2}), capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


class Page(HTTPServer):
    text = b""


class Handler(BaseHTTPRequestHandler):
    server: Page

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.text)


@pytest.fixture
def page() -> Iterator[Page]:
    with Page(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def told(page: Page, text: bytes) -> int:
    page.text = text
    return cli.main(["fleet", "status", "--url", f"http://127.0.0.1:{page.server_port}"])


def test_status_tells_of_each_replica(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(page, fleet_text(TEXTS, {"RUNNING": 2, "STARTING": 1})) == 0
    first, columns, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith(": 2 running, 1 starting")
    assert columns.split() == ["REPLICA", "MODEL", "STATE", "RUNNING", "WAITING", "KV", "CACHE", "REQUESTS"]
    assert [row.split() for row in rows] == [
        ["a", "tiny", "serving", "3", "0", "30%", "prefix", "2,", "spilled", "1"],
        ["b", "tiny", "restarting", "0", "0", "0%"],
    ]


def test_status_fails_where_no_replica_serves(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(page, fleet_text({"b": TEXTS["b"]}, {"RUNNING": 1})) == 1
    assert told(page, fleet_text({}, {})) == 1
    assert "no replica" in capsys.readouterr().out


def test_status_knows_one_server_from_a_fleet(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(page, TEXTS["a"].partition(b"# HELP headway_fleet")[0]) == 1
    assert "is one server and no fleet" in capsys.readouterr().err


def test_status_tells_in_a_line_that_nothing_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fleet", "status", "--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway: no fleet answers at http://127.0.0.1:1")
