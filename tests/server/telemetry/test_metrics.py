"""The families of /metrics: described, started at 0, bounded in labels, and cheap to scrape."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
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
from prometheus_client.parser import text_string_to_metric_families

from headway.engine import DraftCheckState, EngineStats
from headway.server.base.config import MetricsNames
from headway.server.base.errors import CODES
from headway.server.engine.client import State
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import ENDPOINTS, STATUSES, Metrics, endpoint_of

ROOT = Path(__file__).parents[3]


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """{(name, label values ...): value}."""
    return {(s.name, *s.labels.values()): s.value for family in metrics.families() for s in family.samples}


def test_the_page_of_metrics_is_what_the_code_says() -> None:
    written = (ROOT / "docs/metrics.md").read_text()
    generated = runpy.run_path(str(ROOT / "tools/metrics_page.py"))["page"]()
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
    for code in (*CODES, "other"):
        assert found["headway_http_errors_total", code] == 0
    assert found["headway_requests_finished_total", "error"] == 0


def test_made_up_paths_and_methods_make_no_labels() -> None:
    metrics = Metrics(EngineStats, lambda: 0)
    before = samples(metrics).keys()
    for path in ("/x", "/y", "/v1/completions/../z"):
        metrics.count_response(endpoint_of(path), 404)
        metrics.count_error(path)
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


def test_the_estimated_speedup_is_that_of_the_last_minute_and_nan_before_the_first_round() -> None:
    stats = EngineStats()
    metrics = Metrics(lambda: stats, lambda: 0)
    metrics.history.add_point(1.0)
    assert math.isnan(samples(metrics)["headway_spec_decode_estimated_speedup_ratio",])
    stats = msgspec.structs.replace(stats, round_seconds=2.0, undrafted_seconds=5.0)
    metrics.history.add_point(2.0)
    assert samples(metrics)["headway_spec_decode_estimated_speedup_ratio",] == 2.5


@pytest.mark.parametrize("state", get_args(DraftCheckState))
def test_the_result_of_the_heads_check_is_one_of_the_states(state: DraftCheckState) -> None:
    found = samples(Metrics(EngineStats, lambda: 0, read_draft_check=lambda: state))
    shown = {name[1]: value for name, value in found.items() if name[0] == "headway_spec_decode_check_state"}
    assert shown == {name: float(name == state) for name in get_args(DraftCheckState)}


VLLM_STATS = EngineStats(
    num_requests_running=2,
    num_requests_waiting=3,
    num_kv_blocks=8,
    num_kv_blocks_used=2,
    kv_block_size=16,
    num_prompt_tokens=70,
    num_cached_prompt_tokens=32,
    num_prefix_query_tokens=64,
    num_generation_tokens=90,
    num_step_tokens=128,
    num_steps_by_tokens=[0, 5, 2, *[0] * 10, 1],
    num_drafts=20,
    num_draft_tokens=60,
    num_accepted_tokens=45,
    draft_tokens_per_position=[20, 20, 20],
    accepted_tokens_per_position=[18, 15, 12],
    num_preemptions=4,
    finished_by_reason={"stop": 6, "length": 1},
)


def vllm_samples(names: MetricsNames = "vllm") -> dict[tuple[str, ...], float]:
    """With labels in the order of their names, model_name and engine checked and left out."""
    found = {}
    metrics = Metrics(lambda: VLLM_STATS, lambda: 0, model_name="tiny", names=names)
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("engine") == "0"
                assert labels.pop("model_name", "tiny") == "tiny"
            found[sample.name, *(labels[name] for name in sorted(labels))] = sample.value
    return found


def test_vllm_names_tell_what_the_engine_counted() -> None:
    found = vllm_samples()
    expected = {
        ("num_requests_running",): 2, ("num_requests_waiting",): 3, ("kv_cache_usage_perc",): 0.25,
        ("cache_config_info", "16", "8"): 1, ("prompt_tokens_total",): 70, ("generation_tokens_total",): 90,
        ("prefix_cache_queries_total",): 64, ("prefix_cache_hits_total",): 32, ("num_preemptions_total",): 4,
        ("prompt_tokens_by_source_total", "local_compute"): 38,
        ("prompt_tokens_by_source_total", "local_cache_hit"): 32,
        ("prompt_tokens_by_source_total", "external_kv_transfer"): 0,
        ("num_requests_waiting_by_reason", "capacity"): 3, ("num_requests_waiting_by_reason", "deferred"): 0,
        ("request_success_total", "stop"): 6, ("request_success_total", "length"): 1,
        ("request_success_total", "abort"): 0, ("request_success_total", "error"): 0,
        ("spec_decode_num_drafts_total",): 20, ("spec_decode_num_draft_tokens_total",): 60,
        ("spec_decode_num_accepted_tokens_total",): 45,
        ("spec_decode_num_accepted_tokens_per_pos_total", "0"): 18,
        ("spec_decode_num_accepted_tokens_per_pos_total", "2"): 12,
        ("iteration_tokens_total_sum",): 128, ("iteration_tokens_total_count",): 8,
        ("iteration_tokens_total_bucket", "8.0"): 5, ("iteration_tokens_total_bucket", "16384.0"): 7,
    }  # fmt: skip
    assert {key: found.get((f"vllm:{key[0]}", *key[1:])) for key in expected} == expected
    assert ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "3") not in found


def test_the_sizes_of_the_cache_are_told_once_they_are_known() -> None:
    found = vllm_samples("both")
    assert found["headway_cache_config_info", "16", "8"] == found["vllm:cache_config_info", "16", "8"] == 1
    loading = samples(Metrics(EngineStats, lambda: 0, names="both"))
    assert [key for key in loading if "cache_config_info" in key[0]] == []


def test_each_choice_of_names_shows_those_names_and_the_process() -> None:
    prefixes = {}
    for names in get_args(MetricsNames):
        families = [family.name for family in Metrics(EngineStats, lambda: 0, names=names).families()]
        assert len(set(families)) == len(families)
        prefixes[names] = {re.split("[_:]", name)[0] for name in families}
    assert prefixes == {
        "headway": {"headway", "process"},
        "vllm": {"vllm", "process"},
        "both": {"headway", "vllm", "process"},
    }


def test_an_engine_without_speculation_has_no_speculation_families_of_vllm() -> None:
    families = [family.name for family in Metrics(EngineStats, lambda: 0, names="vllm").families()]
    assert [name for name in families if "spec_decode" in name] == []


@pytest.mark.parametrize("name", ["headway_chunk_gap_seconds", "headway_time_per_output_token_seconds"])
def test_times_between_tokens_are_told_apart_up_to_10_seconds(name: str) -> None:
    bounds = [float(key[1]) for key in samples(Metrics(EngineStats, lambda: 0)) if key[0] == f"{name}_bucket"]
    assert [bound for bound in bounds if bound > 1.0] == [2.5, 5.0, 10.0, math.inf]


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("headway_request_duration_seconds", 1800.0),  # a long answer on a slow machine
        ("headway_time_to_first_token_seconds", 1800.0),
        ("headway_request_prompt_tokens", 1e6),  # the longest contexts that models have
        ("headway_request_max_tokens", 1e6),
    ],
)
def test_what_is_long_is_told_apart_too(name: str, longest: float) -> None:
    bounds = [float(key[1]) for key in samples(Metrics(EngineStats, lambda: 0)) if key[0] == f"{name}_bucket"]
    assert bounds[-2:] == [longest, math.inf]


async def test_sizes_and_phases_of_a_request_are_observed_once_a_choice_and_once_a_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, services: Services
) -> None:
    engine.round_seconds, engine.queue_seconds = 0.02, 0.01
    body = {"prompt": ["ab", "abcd"], "n": 3, "max_tokens": 7}
    answer = (await client.post("/v1/completions", json=body)).json()
    found = samples(services.metrics)
    sums = {name: found[f"headway_{name}_sum",] for name in (
        "request_prompt_tokens", "request_generation_tokens", "request_max_tokens",
        "request_longest_choice_tokens", "request_choices", "queue_time_seconds", "inference_time_seconds",
        "prefill_time_seconds", "decode_time_seconds", "request_duration_seconds",
    )}  # fmt: skip
    counts = [found[f"headway_{name}_count",] for name in sums]
    assert counts == [6, 6, 6, 2, 2, 6, 6, 6, 6, 6]
    assert sums["request_prompt_tokens"] == 3 * answer["usage"]["prompt_tokens"]
    assert sums["request_generation_tokens"] == sums["request_max_tokens"] == 6 * 7
    assert (sums["request_longest_choice_tokens"], sums["request_choices"]) == (2 * 7, 2 * 3)
    phases = sums["prefill_time_seconds"] + sums["decode_time_seconds"]
    assert phases == pytest.approx(sums["inference_time_seconds"])
    assert phases + sums["queue_time_seconds"] == pytest.approx(sums["request_duration_seconds"])
    assert sums["decode_time_seconds"] >= 6 * 2 * 0.02


async def test_the_longest_choice_is_that_of_its_own_prompt(
    client: httpx.AsyncClient, engine: FakeEngine, services: Services
) -> None:
    engine.script = lambda request: [40] * (2 + len(request.prompt_token_ids) * (1 + request.request_id % 2))
    await client.post("/v1/completions", json={"prompt": ["a", "abcd"], "n": 2, "max_tokens": 50})
    found = samples(services.metrics)
    lengths = [len(submit.prompt_token_ids) for submit in engine.submitted]
    assert found["headway_request_longest_choice_tokens_sum",] == sum(2 + 2 * size for size in lengths[::2])


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
    """The least CPU time of each over many turns, which alternate: so a slower or busier machine slows all of
    them."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(100):
        for work, found in zip(works, seconds, strict=True):
            started = time.thread_time()
            work()
            found.append(time.thread_time() - started)
    return [min(found) for found in seconds]


async def test_a_scrape_costs_no_more_at_256_streams(
    client: httpx.AsyncClient, engine: FakeEngine, services: Services
) -> None:
    """The CPU time is compared with that of scrapes of an idle server, which are taken in turn with them."""
    idle_engine = FakeEngine()
    idle = Metrics(lambda: idle_engine.stats, lambda: idle_engine.num_restarts)
    for _ in range(60):
        idle.history.add_point(0.0)
        services.metrics.history.add_point(0.0)
    num_idle = len(samples(services.metrics))
    assert num_idle == len(samples(idle))
    engine.stall_after = 3
    body = {"prompt": "a", "n": 128, "max_tokens": 50, "stream": True}
    streams = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(2)]
    while len(engine.running) < 256:
        await asyncio.sleep(0.01)
    num_busy = len(samples(services.metrics))
    idle_seconds, busy_seconds = best_seconds(idle.text, services.metrics.text)
    for stream in streams:
        stream.cancel()
    assert num_busy < num_idle + 32, "no family of one sample a stream"
    assert busy_seconds < 1.5 * idle_seconds


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
