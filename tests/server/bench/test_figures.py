"""From outcomes to figures, by formulas stated once more."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from headway.server.bench import __main__ as bench
from headway.server.bench.client import Outcome, ShareResult
from headway.server.bench.figures import Figures, Level, References, figures_of, percentiles
from headway.server.bench.interference import LongPrompts, interference_of
from headway.server.bench.report import engine_rates, plain_milliseconds, show, show_interference, write
from headway.server.bench.server_side import read_engine

GOOD = Outcome(
    start=10.0,
    first=10.5,
    end=12.5,
    num_chunks=4,
    gaps=[0.5, 1.0, 0.5],
    completion_tokens=9,
    accepted_tokens=5,
)
QUICK = Outcome(
    start=11.0, first=11.1, end=11.9, num_chunks=3, gaps=[0.4, 0.4], completion_tokens=9, accepted_tokens=6
)
SLOW = Outcome(start=10.0, first=10.5, end=14.5, num_chunks=3, gaps=[2.0, 2.0], completion_tokens=9)
NONE = References()
REFUSED = Outcome(start=11.0, end=14.0, error="status 429")
AFTER = {
    "headway_tokens_per_round_sum": 116.0,
    "headway_tokens_per_round_count": 55.0,
    'headway_spec_decode_num_draft_tokens_per_pos_total{position="1"}': 60.0,
    'headway_spec_decode_num_accepted_tokens_per_pos_total{position="1"}': 45.0,
    'headway_spec_decode_num_draft_tokens_per_pos_total{position="2"}': 50.0,
    'headway_spec_decode_num_accepted_tokens_per_pos_total{position="2"}': 25.0,
}  # fmt: skip
BEFORE = dict.fromkeys(AFTER, 10.0) | {
    "headway_tokens_per_round_sum": 16.0,
    "headway_tokens_per_round_count": 15.0,
}


def figures(
    before: dict[str, float], after: dict[str, float], plain: float | None = None, engine: float | None = None
) -> Figures:
    results = [ShareResult([GOOD, REFUSED], 1.0, 4.0), ShareResult([QUICK], 3.0, 4.0)]
    return figures_of(Level(2, None), results, before, after, References(plain, engine))


def test_latencies_and_throughput() -> None:
    found = figures({}, {})
    assert found.level == "2 streams"
    assert (found.num_requests, found.errors) == (3, {"status 429": 1})
    assert found.seconds == 4.0
    assert found.tokens_per_second == 18 / 4
    assert found.requests_per_second == 2 / 4
    assert found.time_to_first_token["p50"] == pytest.approx(1e3 * (0.5 + 0.1) / 2)
    assert found.time_per_output_token["p50"] == pytest.approx(1e3 * (2.0 / 8 + 0.8 / 8) / 2)
    assert found.chunk_gap["p50"] == pytest.approx(500)
    assert list(found.chunk_gap) == ["p50", "p90", "p99", "p99.9"]
    assert found.end_to_end["p99"] == pytest.approx(1e3 * (0.9 + 0.99 * (2.5 - 0.9)))
    assert found.tokens_per_chunk == 18 / 7
    assert (found.num_workers, found.client_cpu_share) == (2, 0.75)


def test_speculation_by_usage_and_by_metrics() -> None:
    found = figures(BEFORE, AFTER, plain=300.0)
    assert found.acceptance_length == 16 / (16 - 11)
    assert found.engine_acceptance_length == 100 / 40
    assert found.acceptance_per_position == [35 / 50, 15 / 40]
    assert found.conversion == pytest.approx(300 / found.time_per_output_token["p50"] / 2.5)


def test_a_server_without_metrics_leaves_usage() -> None:
    found = figures({}, {}, plain=300.0)
    assert (found.engine_acceptance_length, found.acceptance_per_position) == (None, [])
    assert found.conversion == pytest.approx(300 / found.time_per_output_token["p50"] / 3.2)


def test_the_engine_alone_is_compared_where_it_did_the_same() -> None:
    line = {"num_streams": 2, "depth": 3, "input_len": 8, "output_len": 9, "tokens_per_second": 6.0}
    other = {**line, "depth": 0, "tokens_per_second": 3.0}
    text = json.dumps({"closed_loop": [line, other]})
    rates = engine_rates(text, {"depth": 3, "input_len": 8, "output_len": 9})
    assert rates == {"2 streams": 6.0}
    assert engine_rates(text, {"depth": 3, "input_len": 8, "output_len": 10}) == {}
    assert figures({}, {}, engine=rates["2 streams"]).share_of_engine == 18 / 4 / 6
    assert figures({}, {}).share_of_engine is None


def test_nothing_answered_is_no_figure() -> None:
    found = figures_of(Level(1, 2.5), [ShareResult([REFUSED], 0.0, 0.0)], {}, {}, References(5.0))
    assert (found.level, found.tokens_per_second, found.conversion) == ("2.5 requests/s", 0.0, None)
    assert found.time_to_first_token == found.chunk_gap == {}
    show([found])


def test_long_prompts_and_streams_are_compared_with_what_each_does_alone() -> None:
    prompts = LongPrompts(num_tokens=600, every_seconds=2.0)
    quiet, late = figures({}, {}), figures_of(Level(2, None), [ShareResult([SLOW], 1.0, 4.0)], {}, {}, NONE)
    alone, arrived = [prompt(0.1), prompt(0.2), prompt(0.9)], [prompt(0.5), prompt(0.4), prompt(0.3), REFUSED]
    found = interference_of(prompts, quiet, late, alone=alone, arrived=arrived)
    assert (found.level, found.num_prompts, found.errors) == ("2 streams", 4, {"status 429": 1})
    assert found.chunk_gap_ratio == pytest.approx(late.chunk_gap["p99"] / quiet.chunk_gap["p99"])
    assert found.chunk_gap_ratio > 1.5
    assert found.tokens_per_second_alone == pytest.approx(600 / 0.2)
    assert found.tokens_per_second == pytest.approx(600 / 0.4)
    assert found.prefill_share == pytest.approx(0.5)
    show_interference([found])


def test_prompts_that_nobody_answered_are_no_ratio() -> None:
    nothing = figures_of(Level(1, None), [], {}, {}, NONE)
    found = interference_of(LongPrompts(600, 2.0), nothing, nothing, alone=[REFUSED], arrived=[])
    assert (found.chunk_gap_ratio, found.tokens_per_second_alone, found.prefill_share) == (None, None, None)
    show_interference([found])


def prompt(first_token_seconds: float) -> Outcome:
    return Outcome(10.0, 10.0 + first_token_seconds, 10.0 + first_token_seconds, num_chunks=1)


def test_percentiles_lie_between_the_values() -> None:
    assert percentiles([]) == {}
    assert percentiles([2.0]) == {"p50": 2000, "p90": 2000, "p99": 2000}
    assert percentiles([n / 100 for n in range(101)]) == pytest.approx({"p50": 500, "p90": 900, "p99": 990})


def test_what_is_written_is_a_baseline(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write(file, {"command": "c"}, [figures({}, {})])
    assert json.loads(file.read_text())["command"] == "c"
    assert plain_milliseconds(file.read_text()) == {"2 streams": pytest.approx(175)}


def test_a_level_without_requests_is_no_baseline_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = figures_of(Level(1, 0.1), [ShareResult([], 0.1, 1.0)], {}, {}, References(5.0, 9.0))
    monkeypatch.setattr(bench, "run", lambda arguments: ([figures({}, {}), nothing], []))
    file = tmp_path / "run.json"
    assert bench.main(["--json", str(file)]) == 1
    assert capsys.readouterr().err == "headway: 0.1 requests/s: no request was due; raise --duration\n"
    assert plain_milliseconds(file.read_text()) == {"2 streams": pytest.approx(175)}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--baseline", "/none"], "/none cannot be read"),
        (["--baseline", __file__], "it must be a file that headway bench serve"),
        (
            ["--base-url", "http://127.0.0.1:9"],
            "http://127.0.0.1:9 cannot be used: [Errno 111] Connection refused; start",
        ),
        (["--prompt-every", "1", "--num-requests", "9"], "--num-requests is 9, it does not go with"),
        (["--prompt-every", "12"], "--prompt-every is 12, it must be below --duration, 10, for"),
        (
            ["--prompt-every", "3", "--duration", "3"],
            "--prompt-every is 3, it must be below --duration, 3, for",
        ),
        (["--base-url", "http://[::1"], "http://[::1 cannot be used: Invalid"),
        (["--json", "/nope/x.json"], "--json is /nope/x.json, and /nope is no folder"),
        (["--json", "/"], "--json is /, which is a folder; name a file"),
        (["--prompts", "/dev/null"], "--prompts is /dev/null, which has no line"),
    ],
    ids=[
        "no-baseline",
        "wrong-baseline",
        "no-server",
        "number-of-requests",
        "no-prompt-in-10-s",
        "no-prompt-in-3-s",
        "no-url",
        "no-folder",
        "json-is-a-folder",
        "no-prompts",
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("headway: ")
    assert complaint in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--base-url", "localhost:9"],
            "--base-url: 'localhost:9' is no URL such as http://localhost:8000\n",
        ),
        (["--api-key", "ké"], "--api-key: a key has 1 character or more, printable ASCII without spaces\n"),
        (["--api-key", ""], "--api-key: a key has 1 character or more, printable ASCII without spaces\n"),
    ],
    ids=["no-scheme", "key-not-ascii", "empty-key"],
)
def test_a_url_and_a_key_are_what_they_are_elsewhere(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert capsys.readouterr().err.endswith(complaint)


def test_the_url_may_end_as_that_of_clients_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--base-url", "http://127.0.0.1:9/v1"]) == 1
    assert capsys.readouterr().err.startswith("headway: http://127.0.0.1:9 cannot be used: ")


def test_a_file_that_cannot_be_written_is_one_line_below_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "run", lambda arguments: ([figures({}, {})], []))
    assert bench.main(["--json", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "2 streams" in shown.out
    assert shown.err.startswith(f"headway: --json is {tmp_path}, which cannot be written: ")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"engine": 1}', b"\xff"])
def test_a_server_that_tells_nothing_of_its_engine_is_another(content: bytes) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=content))
    with httpx.Client(transport=transport, base_url="http://x") as client:
        assert read_engine(client) == {}
