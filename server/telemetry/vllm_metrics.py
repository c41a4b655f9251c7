"""The metrics under vLLM's names and labels, for tools that read vLLM's metrics.

Names and meanings are those of vLLM 0.33 (vllm/v1/metrics/loggers.py). Buckets are Headway's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, zip_longest

from prometheus_client import Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headway.engine import STEP_TOKEN_BOUNDS, EngineStats, FinishReason
from headway.server.telemetry.history import kv_cache_usage
from headway.server.telemetry.request_metrics import RequestMetrics

LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers the engines of one server; there is one

# Name after `vllm:`: (Headway's name, value).
Read = Callable[[EngineStats], float]
GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("headway_num_requests_running", lambda s: s.num_requests_running),
    "num_requests_waiting": ("headway_num_requests_waiting", lambda s: s.num_requests_waiting),
    "kv_cache_usage_perc": ("headway_kv_cache_usage_ratio", kv_cache_usage),
}
COUNTERS: dict[str, tuple[str, Read]] = {
    "prompt_tokens": ("headway_prompt_tokens_total", lambda s: s.num_prompt_tokens),
    "prompt_tokens_cached": ("headway_prefix_cache_hit_tokens_total", lambda s: s.num_cached_prompt_tokens),
    "generation_tokens": ("headway_generation_tokens_total", lambda s: s.num_generation_tokens),
    "prefix_cache_queries": (
        "headway_prefix_cache_query_tokens_total",
        lambda s: s.num_prefix_query_tokens,
    ),
    "prefix_cache_hits": ("headway_prefix_cache_hit_tokens_total", lambda s: s.num_cached_prompt_tokens),
    "num_preemptions": ("headway_preemptions_total", lambda s: s.num_preemptions),
}
# Counters that only an engine with speculation shows.
SPECULATION: dict[str, tuple[str, Read]] = {
    "spec_decode_num_drafts": ("headway_spec_decode_num_drafts_total", lambda s: s.num_drafts),
    "spec_decode_num_draft_tokens": (
        "headway_spec_decode_num_draft_tokens_total",
        lambda s: s.num_draft_tokens,
    ),
    "spec_decode_num_accepted_tokens": (
        "headway_spec_decode_num_accepted_tokens_total",
        lambda s: s.num_accepted_tokens,
    ),
}


class VllmCollector(Collector):
    """Builds vLLM's families anew for each scrape from existing counts. Immutable."""

    def __init__(
        self, read_stats: Callable[[], EngineStats], requests: RequestMetrics, model_name: str
    ) -> None:
        self._read_stats = read_stats
        self._labels = (model_name, ENGINE)
        self._histograms = {
            "time_to_first_token_seconds": requests.time_to_first_token,
            "inter_token_latency_seconds": requests.chunk_gap,
            "request_time_per_output_token_seconds": requests.time_per_output_token,
            "time_per_output_token_seconds": requests.chunk_gap,  # vLLM's name before 0.11
            "e2e_request_latency_seconds": requests.end_to_end,
            "request_queue_time_seconds": requests.queue_time,
            "request_prefill_time_seconds": requests.prefill_time,
            "request_decode_time_seconds": requests.decode_time,
            "request_inference_time_seconds": requests.inference_time,
            "request_prompt_tokens": requests.prompt_tokens,
            "request_generation_tokens": requests.generation_tokens,
            "request_max_num_generation_tokens": requests.longest_choice,
            "request_params_n": requests.choices,
            "request_params_max_tokens": requests.max_tokens,
        }

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not read an engine that has not started

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        for name, (own, read) in GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", f"{own} by vLLM's name.", labels=LABELS)
            gauge.add_metric(self._labels, read(stats))
            yield gauge
        yield self._labelled(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "headway_num_requests_waiting by vLLM's name; no request is ever deferred.",
            "reason",
            {"capacity": stats.num_requests_waiting, "deferred": 0},
        )
        num_cached = stats.num_cached_prompt_tokens
        yield self._labelled(
            CounterMetricFamily,
            "prompt_tokens_by_source",
            "headway_prompt_tokens_total by vLLM's name, apart by whether the prefix cache had them.",
            "source",
            {
                "local_compute": stats.num_prompt_tokens - num_cached,
                "local_cache_hit": num_cached,
                "external_kv_transfer": 0,
            },
        )
        is_speculating = bool(stats.accepted_tokens_per_position)
        for name, (own, read) in (COUNTERS | (SPECULATION if is_speculating else {})).items():
            counter = CounterMetricFamily(f"vllm:{name}", f"{own} by vLLM's name.", labels=LABELS)
            counter.add_metric(self._labels, read(stats))
            yield counter
        if is_speculating:
            yield self._labelled(
                CounterMetricFamily,
                "spec_decode_num_accepted_tokens_per_pos",
                "headway_spec_decode_num_accepted_tokens_per_pos_total by vLLM's name, with positions from 0.",
                "position",
                {str(i): count for i, count in enumerate(stats.accepted_tokens_per_position)},
            )
        yield self._labelled(
            CounterMetricFamily,
            "request_success",
            "headway_requests_finished_total by vLLM's name; it counts every ending, failures too.",
            "finished_reason",
            {reason.value: stats.finished_by_reason.get(reason.value, 0) for reason in FinishReason},
        )
        yield _cache_config(stats)
        for name, histogram in self._histograms.items():
            yield self._renamed(f"vllm:{name}", histogram)
        yield self._step_tokens(stats)

    def _labelled(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        documentation: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(f"vllm:{name}", documentation, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _renamed(self, name: str, histogram: Histogram) -> Metric:
        """Returns the histogram's present counts under another name."""
        (source,) = histogram.collect()
        family = HistogramMetricFamily(name, f"{source.name} by vLLM's name.", labels=LABELS)
        buckets = [(s.labels["le"], s.value) for s in source.samples if s.name.endswith("_bucket")]
        (total,) = [s.value for s in source.samples if s.name.endswith("_sum")]
        family.add_metric(self._labels, buckets=buckets, sum_value=total)
        return family

    def _step_tokens(self, stats: EngineStats) -> Metric:
        """Returns a histogram whose name ends like a counter's, as in vLLM."""
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "headway_tokens_per_step by vLLM's name.", labels=LABELS
        )
        family.add_metric(self._labels, buckets=step_token_buckets(stats), sum_value=stats.num_step_tokens)
        return family


def step_token_buckets(stats: EngineStats) -> list[tuple[str, float]]:
    """Returns cumulative (le, count) pairs of the tokens of the engine's steps."""
    bounds = [*(f"{bound}.0" for bound in STEP_TOKEN_BOUNDS), "+Inf"]
    counts = zip_longest(bounds, accumulate(stats.num_steps_by_tokens), fillvalue=0)
    return [(str(bound), float(count)) for bound, count in counts]


def _cache_config(stats: EngineStats) -> Metric:
    """Returns the sizes as labels, where gateways look for them."""
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "headway_cache_config_info by vLLM's name.",
        labels=("block_size", "num_gpu_blocks", "engine"),
    )
    if stats.num_kv_blocks:  # the engine has reported its sizes
        family.add_metric((str(stats.kv_block_size), str(stats.num_kv_blocks), ENGINE), 1)
    return family
