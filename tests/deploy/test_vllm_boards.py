"""What was made to read vLLM's metrics reads Headway's: Grafana boards, autoscalers, `vllm bench serve`.

Queries are those of vLLM's boards (examples/observability in its repository: grafana.json,
performance_statistics.json, query_statistics.json, vllm_speculative_decoding.json, vllm_kv_cache.json), with
Grafana's variables filled in.
"""

from __future__ import annotations

import math

import httpx
import pytest
from headway_testing.daemon import Server
from headway_testing.prometheus import Prometheus

pytestmark = pytest.mark.slow

MODEL = "boards/tiny"  # the name that the fixture `server` gives it
NUM_REQUESTS = 3  # with a scrape after each
BY_MODEL = f'{{model_name="{MODEL}"}}'
BY_ALL = f'{{job=~"headway", model_name=~"{MODEL}", instance=~".+", engine=~"0"}}'


def quantile(share: float, name: str, labels: str = BY_MODEL) -> str:
    return f"histogram_quantile({share}, sum by(le) (rate(vllm:{name}_bucket{labels}[30s])))"


def rate(name: str, labels: str = BY_MODEL) -> str:
    return f"rate(vllm:{name}{labels}[30s])"


def mean(name: str, labels: str = BY_MODEL) -> str:
    return f"{rate(f'{name}_sum', labels)} / {rate(f'{name}_count', labels)}"


def share(part: str, whole: str) -> str:
    return f"sum({rate(part, BY_ALL)}) / (sum({rate(whole, BY_ALL)}) > 0)"


QUERIES = {
    "end to end, quantile": quantile(0.99, "e2e_request_latency_seconds"),
    "end to end, mean": mean("e2e_request_latency_seconds"),
    "end to end, by model": 'histogram_quantile(0.50, sum by(le, model_name) '
    f'(rate(vllm:e2e_request_latency_seconds_bucket{{model_name=~"{MODEL}"}}[30s])))',
    "prompt tokens": rate("prompt_tokens_total"),
    "generated tokens": rate("generation_tokens_total"),
    "steps": rate("iteration_tokens_total_count", ""),
    "between tokens, quantile": quantile(0.95, "inter_token_latency_seconds"),
    "between tokens, mean": mean("inter_token_latency_seconds", ""),
    "per output token of a request": quantile(0.9, "request_time_per_output_token_seconds"),
    "running": f"vllm:num_requests_running{BY_MODEL}",
    "waiting": f"vllm:num_requests_waiting{BY_MODEL}",
    "waiting for capacity": f'sum(vllm:num_requests_waiting_by_reason{BY_ALL[:-1]}, reason="capacity"}})',
    "first token, quantile": quantile(0.5, "time_to_first_token_seconds"),
    "first token, mean": mean("time_to_first_token_seconds"),
    "use of the cache": f"vllm:kv_cache_usage_perc{BY_MODEL}",
    "lengths of prompts": f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{BY_MODEL}[30s]))",
    "lengths of outputs": f"sum by(le) (increase(vllm:request_generation_tokens_bucket{BY_MODEL}[30s]))",
    "endings": f"sum by(finished_reason) (increase(vllm:request_success_total{BY_MODEL}[30s]))",
    "tokens a prompt": f"sum({rate('prompt_tokens_total')}) / sum({rate('request_success_total')})",
    "queue": rate("request_queue_time_seconds_sum"),
    "prefill": rate("request_prefill_time_seconds_sum"),
    "decode": rate("request_decode_time_seconds_sum"),
    "inference": rate("request_inference_time_seconds_sum"),
    "longest choice": rate("request_max_num_generation_tokens_sum"),
    "choices": rate("request_params_n_sum"),
    "limits": rate("request_params_max_tokens_sum"),
    "acceptance": share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
    "acceptance length": f"1 + {share('spec_decode_num_accepted_tokens_total', 'spec_decode_num_drafts_total')}",
    "acceptance by position": f"sum by (position) ({rate('spec_decode_num_accepted_tokens_per_pos_total', BY_ALL)}) "
    f"/ on () group_left () (sum({rate('spec_decode_num_drafts_total', BY_ALL)}) > 0)",
    "output from drafts": share("spec_decode_num_accepted_tokens_total", "generation_tokens_total"),
    "prefix cache hits": share("prefix_cache_hits_total", "prefix_cache_queries_total"),
    "cached prompt tokens": share("prompt_tokens_cached_total", "prompt_tokens_total"),
    "preemptions": f"sum({rate('num_preemptions_total', BY_ALL)})",
    "an autoscaler's": f"sum(vllm:num_requests_waiting{BY_MODEL})",
}  # fmt: skip


@pytest.fixture(scope="module")
def prometheus(server: Server, scraping: Prometheus) -> Prometheus:
    """It has scraped twice a second while requests with speculation ran."""
    for _ in range(NUM_REQUESTS):
        ask_twice(server)
        scraping.wait_for_scrape()
    return scraping


def ask_twice(server: Server) -> None:
    """One prompt whose blocks are cached from its second time on, for two answers."""
    body = {"prompt": "def parse(text):\n" * 3, "max_tokens": 24, "n": 2}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    server.wait_until_idle()


def test_every_query_of_vllms_boards_has_data(prometheus: Prometheus) -> None:
    found = {title: prometheus.query(expression) for title, expression in QUERIES.items()}
    assert {title for title, values in found.items() if not values} == set()
    assert {title for title, values in found.items() if any(math.isnan(v) for _, v in values)} == set()


def test_boards_find_the_model_by_its_label(prometheus: Prometheus) -> None:
    url = f"{prometheus.url}/api/v1/label/model_name/values"
    assert httpx.get(url, params={"match[]": "vllm:generation_tokens_total"}).json()["data"] == [MODEL]


def test_acceptance_by_vllms_names_is_that_of_the_engine(prometheus: Prometheus, server: Server) -> None:
    prometheus.wait_for_scrape()
    per_position = prometheus.query("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    accepted = {labels["position"]: value for labels, value in per_position}
    assert sorted(accepted) == ["0", "1", "2"]
    for position, value in accepted.items():
        name = "headway_spec_decode_num_accepted_tokens_per_pos_total"
        assert value == server.metric(name, position=str(int(position) + 1))
    assert sum(accepted.values()) == server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


def test_steps_computed_what_was_not_cached_and_what_was_generated(server: Server) -> None:
    """Of requests of which none is left or preempted."""
    names = ("prompt_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total", "generation_tokens_total",
             "iteration_tokens_total_sum", "iteration_tokens_total_count", "num_preemptions_total")  # fmt: skip
    before = {name: server.metric(f"vllm:{name}") for name in names}
    for _ in range(2):
        ask_twice(server)
    values = {name: server.metric(f"vllm:{name}") - before[name] for name in names}
    assert values["num_preemptions_total"] == 0
    assert values["prefix_cache_queries_total"] == values["prompt_tokens_total"]
    assert 0 < values["prefix_cache_hits_total"] < values["prompt_tokens_total"]
    computed = values["prompt_tokens_total"] - values["prefix_cache_hits_total"]
    assert values["iteration_tokens_total_sum"] == computed + values["generation_tokens_total"]
    assert values["iteration_tokens_total_sum"] > values["iteration_tokens_total_count"] > 0


@pytest.mark.parametrize("prefix", ["headway_", "vllm:"])
def test_a_gateway_finds_the_sizes_of_the_cache(prometheus: Prometheus, server: Server, prefix: str) -> None:
    ((labels, value),) = prometheus.query(f"{prefix}cache_config_info")
    blocks = server.metric("headway_kv_cache_blocks", state="total")
    assert (value, labels["block_size"], labels["num_gpu_blocks"]) == (1, "16", f"{blocks:.0f}")


def scraped_by_a_benchmark(url: str) -> tuple[dict[str, int], dict[int, int]]:
    """By the rules of `vllm bench serve`: lines that begin with vllm:spec_decode, names up to the first brace
    that end with _total, the last word as the value, and positions by the text position=\"...\"; ({name:
    sum}, {position: sum})."""
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in httpx.get(f"{url}/metrics").text.split("\n"):
        name, _, rest = line.strip().partition("{")
        if not line.startswith("vllm:spec_decode") or not name.endswith("_total"):
            continue
        value = int(float(line.split(None, 1)[-1]))
        if "num_accepted_tokens_per_pos" in name:
            position = int(rest.split('position="')[1].split('"')[0])
            positions[position] = positions.get(position, 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    return totals, positions


def test_a_benchmark_made_for_vllm_sees_the_drafts(server: Server) -> None:
    before, positions_before = scraped_by_a_benchmark(server.url)
    body = {"prompt": "def add(a, b):\n", "max_tokens": 32}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    server.wait_until_idle()
    after, positions_after = scraped_by_a_benchmark(server.url)
    rise = {name.removeprefix("vllm:spec_decode_"): after[name] - before.get(name, 0) for name in after}
    details = answer["usage"]["completion_tokens_details"]
    assert rise.keys() == {"num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"}
    assert rise["num_accepted_tokens_total"] == details["accepted_prediction_tokens"] > 0
    assert rise["num_draft_tokens_total"] > rise["num_drafts_total"] > 0
    accepted = [positions_after[i] - positions_before.get(i, 0) for i in sorted(positions_after)]
    assert sum(accepted) == rise["num_accepted_tokens_total"]
    assert accepted == sorted(accepted, reverse=True)
