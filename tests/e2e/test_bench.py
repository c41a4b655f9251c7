"""`headway bench serve` against a real server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from headway_testing.daemon import headway_command

from headway.server.bench.interference import NUM_ALONE

pytestmark = pytest.mark.slow

RATES = (0.9, 0.7)
NUM_REQUESTS = 8  # of a closed loop


@pytest.fixture(scope="module")
def server(start: Callable[..., Iterator[Any]]) -> Iterator[Any]:
    rates = ",".join(map(str, RATES))
    # Steps of so many tokens of prompts hold up streams for longer than what else a machine does.
    chunk = "--prefill-chunk", "1000"
    yield from start("--depth", "2", "--synthetic-acceptance", rates, "--no-prefix-caching", *chunk)


def bench(server: Any, file: Path, *arguments: str) -> list[dict[str, Any]]:
    command = headway_command("bench", "serve", "--base-url", server.url)
    subprocess.run([*command, "--json", str(file), *arguments], check=True, timeout=600)
    levels: list[dict[str, Any]] = json.loads(file.read_text())["levels"]
    return levels


def test_closed_loops_tell_what_the_server_counted(server: Any, tmp_path: Path) -> None:
    load = ["--input-len", "16", "--output-len", "60", "--num-requests", f"{NUM_REQUESTS}", "--workers", "2"]
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps({"levels": [{"level": "4 streams", "time_per_output_token": {"p50": 20.0}}]}))
    engine = tmp_path / "engine.json"
    line = {"num_streams": 4, "depth": 2, "input_len": 16, "output_len": 60, "tokens_per_second": 1000.0}
    engine.write_text(json.dumps({"closed_loop": [line]}))
    before = server.metric("headway_generation_tokens_total")
    load += ["--concurrency", "1,4", "--baseline", str(plain), "--engine", str(engine)]
    one, four = bench(server, tmp_path / "run.json", *load)
    warm_up = 8 * (1 + 4)
    assert server.metric("headway_generation_tokens_total") - before == 2 * NUM_REQUESTS * 60 + warm_up
    for level in (one, four):
        assert (level["num_requests"], level["errors"]) == (NUM_REQUESTS, {})
        assert level["tokens_per_second"] == pytest.approx(NUM_REQUESTS * 60 / level["seconds"])
        assert 0 < level["time_to_first_token"]["p50"] < level["end_to_end"]["p50"]
        # Rounds of 1 + 0.9 + 0.7 tokens; about 180 were made.
        assert level["engine_acceptance_length"] == pytest.approx(1 + sum(RATES), abs=0.25)
        assert level["acceptance_length"] == pytest.approx(level["engine_acceptance_length"], rel=0.03)
        assert level["acceptance_per_position"] == pytest.approx(RATES, abs=0.15)
    assert (one["num_workers"], four["num_workers"]) == (1, 2)
    assert (one["conversion"], one["share_of_engine"]) == (None, None)
    assert four["share_of_engine"] == pytest.approx(four["tokens_per_second"] / 1000)
    length = four["engine_acceptance_length"]
    assert four["conversion"] == pytest.approx(20 / four["time_per_output_token"]["p50"] / length)


def test_an_open_loop_runs_for_its_time(server: Any, tmp_path: Path) -> None:
    load = ["--request-rate", "16", "--duration", "1", "--input-len", "8", "--output-len", "10"]
    (level,) = bench(server, tmp_path / "run.json", *load)
    assert level["level"] == "16 requests/s"
    assert 3 <= level["num_requests"] <= 35
    assert level["errors"] == {}


@pytest.mark.parametrize(
    ("seconds", "output_len", "num_prompts"),
    [(3, 150, range(2, 6)), pytest.param(8, 900, range(5, 12), marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_streams_are_measured_without_and_with_long_prompts(
    server: Any, tmp_path: Path, seconds: int, output_len: int, num_prompts: range
) -> None:
    load = [
        "--concurrency",
        "2",
        "--duration",
        f"{seconds}",
        "--input-len",
        "8",
        "--output-len",
        f"{output_len}",
    ]
    file = tmp_path / "run.json"
    before = server.metric("headway_prompt_tokens_total")
    quiet, beside = bench(server, file, *load, "--prompt-every", "0.8", "--prompt-len", "1500")
    num_tokens = server.metric("headway_prompt_tokens_total") - before
    assert (quiet["level"], beside["level"]) == ("2 streams", "2 streams, 1,500 tokens every 0.8 s")
    assert quiet["errors"] == beside["errors"] == {}
    (found,) = json.loads(file.read_text())["interference"]
    assert (found["level"], found["prompt_len"], found["errors"]) == ("2 streams", 1500, {})
    assert found["num_prompts"] in num_prompts
    assert found["chunk_gap_ratio"] == pytest.approx(beside["chunk_gap"]["p99"] / quiet["chunk_gap"]["p99"])
    assert found["chunk_gap_ratio"] > 2
    num_short = 2 * 2 + quiet["num_requests"] + beside["num_requests"]  # two streams were warmed up twice
    assert num_tokens == 8 * num_short + 1500 * (1 + NUM_ALONE + found["num_prompts"])
    assert found["prefill_share"] == pytest.approx(
        found["tokens_per_second"] / found["tokens_per_second_alone"]
    )
