"""Probes, models, version, metrics, and the errors that no route raises."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec
import pytest
from headway_testing.fake_engine import INFO, FakeEngine
from prometheus_client.parser import text_string_to_metric_families

from headway.engine import EngineStats

STATS = EngineStats(
    num_requests_running=2, num_requests_waiting=1, num_kv_blocks=64, num_kv_blocks_used=16,
    num_kv_blocks_cached=8, num_prompt_tokens=100, num_cached_prompt_tokens=32, num_generation_tokens=70,
    num_steps=40, num_drafts=30, num_draft_tokens=88, num_accepted_tokens=50,
    draft_tokens_per_position=[30, 30, 28], accepted_tokens_per_position=[25, 15, 10],
    rounds_by_depth={0: 3, 3: 10}, row_rounds_by_emitted_tokens={1: 5, 2: 10, 4: 15}, num_preemptions=1,
    finished_by_reason={"stop": 4, "length": 6},
)  # fmt: skip


async def samples(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """{(name, label values ...): value}."""
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("serving", 200, 200),
        ("loading", 200, 503),
        ("restarting", 503, 503),
        ("draining", 200, 503),
        ("paused", 200, 503),
    ],
)
async def test_health_is_life_and_ready_is_service(
    client: httpx.AsyncClient, engine: FakeEngine, state: Any, health: int, ready: int
) -> None:
    engine.state = state
    answer = await client.get("/health")
    assert answer.status_code == health
    assert answer.json() == {
        "is_alive": health == 200, "state": state, "phase": "serve", "progress": 1.0, "step": 7,
        "heartbeat_age_seconds": 0.1, "num_restarts": 0,
    }  # fmt: skip
    answer = await client.get("/ready")
    assert answer.status_code == ready
    assert (answer.json()["is_ready"], answer.json()["reason"]) == (ready == 200, state)
    assert (answer.json()["engine"] is not None) == (ready == 200)
    assert answer.json()["warnings"] == []


async def test_a_lossy_server_says_so(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.info = msgspec.structs.replace(INFO, relaxed_thinking=(5, 0.3))
    engine.stats.num_lossy_requests = 7
    answer = (await client.get("/ready")).json()
    assert answer["engine"]["relaxed_thinking"] == [5, 0.3]
    (warning,) = answer["warnings"]
    assert warning.startswith("LOSSY: while a chat reasons, drafts")
    assert (await samples(client))[("headway_lossy_requests_total",)] == 7


async def test_models_lists_the_one_that_is_served(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert (await client.get("/v1/models/tiny")).json() == card


@pytest.mark.parametrize("name", ["gpt-4", "org/name"])
async def test_another_model_is_404(client: httpx.AsyncClient, name: str) -> None:
    response = await client.get(f"/v1/models/{name}")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": "0.1.0"}


@pytest.mark.parametrize("path", ["/v1/nonsense", "/v1/completions//", "/documents"])
async def test_an_unknown_path_is_404_in_the_envelope(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(path)
    assert response.status_code == 404
    assert path in response.json()["error"]["message"]


async def test_a_wrong_method_is_405_with_allow_in_the_envelope(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in response.json()["error"]["message"]


async def test_allow_names_the_methods_of_all_routes_of_a_path(client: httpx.AsyncClient) -> None:
    assert (await client.delete("/v1/speculation")).headers["allow"] == "GET, PUT"


async def test_the_engines_counters_are_shown_under_the_names_of_the_field(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.stats, engine.num_restarts = STATS, 3
    found = await samples(client)
    expected = {
        ("headway_num_requests_running",): 2, ("headway_num_requests_waiting",): 1,
        ("headway_kv_cache_usage_ratio",): 0.25, ("headway_kv_cache_blocks", "total"): 64,
        ("headway_kv_cache_blocks", "used"): 16, ("headway_kv_cache_blocks", "cached"): 8,
        ("headway_prompt_tokens_total",): 100, ("headway_generation_tokens_total",): 70,
        ("headway_prefix_cache_hit_tokens_total",): 32, ("headway_engine_steps_total",): 40,
        ("headway_spec_decode_num_drafts_total",): 30, ("headway_spec_decode_num_draft_tokens_total",): 88,
        ("headway_spec_decode_num_accepted_tokens_total",): 50,
        ("headway_spec_decode_num_draft_tokens_per_pos_total", "3"): 28,
        ("headway_spec_decode_num_accepted_tokens_per_pos_total", "1"): 25,
        ("headway_requests_finished_total", "stop"): 4, ("headway_requests_finished_total", "length"): 6,
        ("headway_preemptions_total",): 1, ("headway_engine_restarts_total",): 3,
        ("headway_spec_decode_depth_bucket", "0.0"): 3, ("headway_spec_decode_depth_bucket", "2.0"): 3,
        ("headway_spec_decode_depth_bucket", "3.0"): 13, ("headway_requests_finished_total", "abort"): 0,
        ("headway_spec_decode_depth_bucket", "+Inf"): 13, ("headway_spec_decode_depth_sum",): 30,
        ("headway_tokens_per_round_bucket", "2.0"): 15, ("headway_tokens_per_round_count",): 30,
        ("headway_tokens_per_round_sum",): 85,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == expected


async def test_times_are_observed_once_a_choice(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.round_seconds = 0.02
    started = time.perf_counter()
    await client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 7})
    seconds = time.perf_counter() - started
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    found = await samples(client)
    counts = [found[f"headway_{name}_seconds_count",] for name in (
        "time_to_first_token", "time_per_output_token", "request_duration")]  # fmt: skip
    assert counts == [3, 2, 3]
    assert found["headway_time_to_first_token_seconds_sum",] >= 3 * 0.02
    assert 2 * 2 * 0.02 / 6 <= found["headway_time_per_output_token_seconds_sum",] < 2 * seconds / 6
    assert found["headway_request_duration_seconds_sum",] >= 2 * 0.06 + 0.02


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/version", "/dashboard"])
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    head, get = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert "content-length" in head.headers


async def test_a_browser_finds_the_page_and_an_icon(client: httpx.AsyncClient) -> None:
    response = await client.get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/dashboard")
    assert (await client.get("/favicon.ico")).headers["content-type"].startswith("image/svg+xml")
