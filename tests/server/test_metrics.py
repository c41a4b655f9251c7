"""The families of /metrics: described, started at 0, bounded in labels, and cheap to scrape."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import runpy
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import httpx
import msgspec
import pytest
from headway_testing.fake_engine import FakeEngine

from headway.engine import EngineStats
from headway.server.engine_client import State
from headway.server.metrics import ENDPOINTS, STATUSES, Metrics
from headway.server.services import Services

ROOT = Path(__file__).parents[2]


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """{(name, label values ...): value}."""
    return {(s.name, *s.labels.values()): s.value for family in metrics.families() for s in family.samples}


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    generated = runpy.run_path(str(ROOT / "docs/metrics_page.py"))["page"]()
    assert written == generated, "run `make docs`"


def test_every_family_has_a_name_of_ours_and_a_sentence() -> None:
    for family in Metrics(EngineStats, lambda: 0).families():
        assert family.name.startswith(("headway_", "process_"))
        assert family.documentation.endswith("."), family.name


def test_labelled_counters_start_at_0() -> None:
    found = samples(Metrics(EngineStats, lambda: 0))
    for endpoint in (*ENDPOINTS.values(), "other"):
        for status in STATUSES:
            assert found["headway_http_responses_total", endpoint, str(status)] == 0
    assert found["headway_requests_finished_total", "error"] == 0


def test_made_up_paths_and_methods_make_no_labels() -> None:
    metrics = Metrics(EngineStats, lambda: 0)
    before = samples(metrics).keys()
    for path in ("/x", "/y", "/v1/completions/../z"):
        metrics.count_response(path, 404)
    assert samples(metrics).keys() == before


def test_the_state_of_the_engine_is_one_of_all() -> None:
    found = samples(Metrics(EngineStats, lambda: 0, read_state=lambda: "restarting"))
    states = {key[1]: value for key, value in found.items() if key[0] == "headway_engine_state"}
    assert states.keys() == set(get_args(State))
    assert [name for name, value in states.items() if value] == ["restarting"]


def test_acceptance_is_that_of_the_last_minute_and_nan_before_the_first_draft() -> None:
    stats = EngineStats()
    metrics = Metrics(lambda: stats, lambda: 0)
    assert math.isnan(samples(metrics)["headway_spec_decode_acceptance_ratio",])
    metrics.history.add_point(1.0)
    assert math.isnan(samples(metrics)["headway_spec_decode_acceptance_length",])
    stats = msgspec.structs.replace(
        stats, num_draft_tokens=8, num_accepted_tokens=6, row_rounds_by_emitted_tokens={2: 1, 4: 3}
    )
    metrics.history.add_point(2.0)
    found = samples(metrics)
    assert found["headway_spec_decode_acceptance_ratio",] == 0.75
    assert found["headway_spec_decode_acceptance_length",] == 3.5


@pytest.mark.parametrize("stream", [False, True], ids=["at-once", "stream"])
async def test_a_gap_is_observed_between_two_pieces_of_each_choice(
    client: httpx.AsyncClient, engine: FakeEngine, services: Services, stream: bool
) -> None:
    engine.round_seconds = 0.02
    await client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 7, "stream": stream})
    found = samples(services.metrics)
    assert found["headway_chunk_gap_seconds_count",] == 2 * 2  # rounds of 3, 3 and 1 tokens
    assert found["headway_chunk_gap_seconds_sum",] >= 4 * 0.02


def best_seconds(*works: Callable[[], object]) -> list[float]:
    """Of many turns: whatever else the machine does may hold up any one of them."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(100):
        for work, taken in zip(works, seconds, strict=True):
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
    return [min(taken) for taken in seconds]


def add(numbers: int) -> None:
    total = 0
    for number in range(numbers):
        total += number


async def test_a_scrape_costs_no_more_at_256_streams(
    client: httpx.AsyncClient, engine: FakeEngine, services: Services
) -> None:
    """Less than 5 ms where Python adds 20 million numbers a second."""
    for _ in range(60):
        services.metrics.history.add_point(0.0)
    num_idle = len(samples(services.metrics))
    engine.stall_after = 3
    body = {"prompt": "a", "n": 128, "max_tokens": 50, "stream": True}
    streams = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
    while len(engine.running) < 256:
        await asyncio.sleep(0.01)
    num_busy = len(samples(services.metrics))
    scrape, addition = best_seconds(services.metrics.text, lambda: add(100_000))
    for stream in streams:
        stream.cancel()
    assert num_busy < num_idle + 32, "no family of one sample a stream"
    assert scrape < addition


async def test_what_is_observed_agrees_with_the_lines_of_the_log(
    address: str, engine: FakeEngine, services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    """A mixed run: streams and whole answers of 1 to 9 tokens, refusals, clients that leave half-way."""
    caplog.set_level(logging.INFO, logger="headway.access")
    engine.round_seconds = 0.002
    chance = random.Random(5)

    async def ask(client: httpx.AsyncClient) -> None:
        body = {"prompt": "a", "max_tokens": chance.randint(0, 9), "stream": chance.random() < 0.5}
        if chance.random() < 0.2:
            body |= {"max_tokens": 200, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())
        else:
            await client.post("/v1/completions", json=body)

    async with httpx.AsyncClient(base_url=address) as client:
        await asyncio.gather(*(ask(client) for _ in range(80)))
    while len(lines := [r.__dict__["fields"] for r in caplog.records if r.name == "headway.access"]) < 80:
        await asyncio.sleep(0.01)

    found = samples(services.metrics)
    statuses = Counter(line["status"] for line in lines)
    assert min(statuses[200], statuses[400]) > 5
    for status in STATUSES:
        assert found["headway_http_responses_total", "completions", str(status)] == statuses[status]
    generated = [line for line in lines if "finish_reasons" in line]
    ended = [line for line in generated if line["finish_reasons"] == ["length"]]
    assert 5 < len(ended) < len(generated)
    assert found["headway_time_to_first_token_seconds_count",] == len(ended)
    assert found["headway_time_per_output_token_seconds_count",] == sum(
        line["completion_tokens"] > 1 for line in ended
    )
    assert found["headway_queue_time_seconds_count",] == sum(
        line["queue_seconds"] is not None for line in generated
    )
    rounds = sum(-(-line["completion_tokens"] // engine.tokens_per_round) for line in generated)
    assert found["headway_chunk_gap_seconds_count",] == rounds - sum(
        line["completion_tokens"] > 0 for line in generated
    )
    waited = sum(line["first_token_seconds"] for line in ended)
    assert found["headway_time_to_first_token_seconds_sum",] == pytest.approx(waited, abs=1e-4)
