"""Collects the families of /metrics: the engine's latest snapshot, and the observations of this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headway import __version__
from headway.engine import MAX_DEPTH, STAGES, AuditOutcome, DraftCheckState, EngineStats, FinishReason
from headway.server.base.config import MetricsNames
from headway.server.base.errors import CODES
from headway.server.engine.client import State
from headway.server.telemetry.history import LAST_MINUTE_SECONDS, History, kv_cache_usage
from headway.server.telemetry.request_metrics import RequestMetrics
from headway.server.telemetry.vllm_metrics import VllmCollector, step_token_buckets

# The library adds a series with its creation time to every counter and histogram; no query needs it.
disable_created_metrics()  # type: ignore[no-untyped-call]

# All labels are shown from the start: a counter that appears with its first event hides that event from
# rate().
ENDINGS = {reason.value: 0 for reason in FinishReason}
ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
OTHER = "other"
STATUSES = (200, 400, 401, 403, 404, 405, 408, 410, 413, 415, 429, 431, 499, 500, 503, 504)
# Name, documentation and value of each counter of the engine.
COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], int]], ...] = (
    ("headway_prompt_tokens", "Tokens of prompts.", lambda s: s.num_prompt_tokens),
    ("headway_prefix_cache_hit_tokens", "Tokens of prompts that came from the prefix cache.", lambda s: s.num_cached_prompt_tokens),
    ("headway_prefix_cache_query_tokens", "Tokens of prompts that were looked up in the prefix cache.", lambda s: s.num_prefix_query_tokens),
    ("headway_generation_tokens", "Tokens generated.", lambda s: s.num_generation_tokens),
    ("headway_engine_steps", "Steps of the engine's loop.", lambda s: s.num_steps),
    ("headway_spec_decode_num_drafts", "Windows of drafts: one a row and round.", lambda s: s.num_drafts),
    ("headway_spec_decode_num_draft_tokens", "Drafted tokens.", lambda s: s.num_draft_tokens),
    ("headway_spec_decode_num_accepted_tokens", "Accepted drafts.", lambda s: s.num_accepted_tokens),
    ("headway_graph_replays", "Rounds replayed as CUDA graphs.", lambda s: s.num_graph_replays),
    ("headway_preemptions", "Requests that gave their blocks back and start over.", lambda s: s.num_preemptions),
    ("headway_nan_logits", "Requests that ended because their logits were NaN or infinite.", lambda s: s.num_nan_logits),
    ("headway_masked_rows", "Rows of steps whose next tokens a grammar restricted.", lambda s: s.num_masked_rows),
    ("headway_lossy_requests", "LOSSY: requests whose drafts may be accepted while they reason though the model does not choose them (--relaxed-thinking).", lambda s: s.num_lossy_requests),
)  # fmt: skip
# The same for counters with one label, and the label's name.
LABELLED_COUNTERS: tuple[tuple[str, str, str, Callable[[EngineStats], Mapping[str, float]]], ...] = (
    ("headway_stage_seconds", "Seconds that the device worked on prefill, and in rounds on drafts, on the target's forward pass (prompts that share it included), on waiting for the masks of grammars and on the bookkeeping around them; by the device's own clock.",
     "stage", lambda s: dict.fromkeys(STAGES, 0.0) | s.stage_seconds),
    ("headway_spec_decode_num_draft_tokens_per_pos", "Drafts by position.", "position", lambda s: _by_position(s.draft_tokens_per_position)),
    ("headway_spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position.", "position",
     lambda s: _by_position(s.accepted_tokens_per_position)),
    ("headway_requests_finished", "Requests that ended, by reason.", "reason", lambda s: ENDINGS | s.finished_by_reason),
    ("headway_audits", "Finished requests that were computed again without drafts (--audit-rate), with the same tokens and log-probabilities or with different ones, and those that were dropped because the server was not idle for so long.",
     "outcome", lambda s: dict.fromkeys(get_args(AuditOutcome), 0) | s.audits_by_outcome),
)  # fmt: skip


def endpoint_of(path: str) -> str:
    """Returns the label of an HTTP request: completions, chat, responses, messages or other."""
    return ENDPOINTS.get(path, OTHER)


class Metrics:
    """Mutable: generations and the access log observe, /metrics reads. There is one registry for the
    process."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_restarts: Callable[[], int],
        *,
        read_state: Callable[[], State] = lambda: "serving",
        read_draft_check: Callable[[], DraftCheckState] = lambda: "none",
        read_replays: Callable[[], int] = lambda: 0,
        model_name: str = "",
        names: MetricsNames = "headway",
        tool_format: str = "plain",
    ) -> None:
        """names: whose names the families have; `both` shows each family twice. tool_format: see
        RequestMetrics."""
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry, tool_format)
        self._responses = Counter(
            "headway_http_responses",
            "HTTP answers by endpoint (completions, chat, responses, messages, other) and status; 499: the client left before it began.",
            ["endpoint", "status"],
            registry=self._registry,
        )
        self._errors = Counter(
            "headway_http_errors",
            "Errors that clients were told, by code, as an HTTP answer or as an event of a stream.",
            ["code"],
            registry=self._registry,
        )
        for endpoint in (*ENDPOINTS.values(), OTHER):
            for status in STATUSES:
                self._responses.labels(endpoint, str(status))
        for code in (*CODES, OTHER):
            self._errors.labels(code)
        self.history = History(read_stats, self.requests.latencies)
        self._registry.register(
            EngineCollector(
                read_stats, read_restarts, read_replays, read_state, read_draft_check, self.history
            )
        )
        server = Info("headway_server", "Version of the server, name of its model.", registry=self._registry)
        server.info({"version": __version__, "model": model_name})
        process, vllm = CollectorRegistry(), CollectorRegistry()
        ProcessCollector(registry=process)
        vllm.register(VllmCollector(read_stats, self.requests, model_name))
        shown = {"headway": [self._registry], "vllm": [vllm], "both": [self._registry, vllm]}
        self._shown = [*shown[names], process]

    def count_response(self, endpoint: str, status: int) -> None:
        self._responses.labels(endpoint, str(status)).inc()

    def count_error(self, code: str | None) -> None:
        self._errors.labels(code if code in CODES else OTHER).inc()

    def text(self) -> bytes:
        return b"".join(map(generate_latest, self._shown))

    def families(self) -> Iterable[Metric]:
        """Returns the metric families of a scrape, for the page that documents them."""
        return (family for registry in self._shown for family in registry.collect())


class EngineCollector(Collector):
    """Builds the engine's families anew for each scrape."""

    def __init__(
        self,
        read_stats: Callable[[], EngineStats],
        read_restarts: Callable[[], int],
        read_replays: Callable[[], int],
        read_state: Callable[[], State],
        read_draft_check: Callable[[], DraftCheckState],
        history: History,
    ) -> None:
        self._read_stats = read_stats
        self._read_restarts = read_restarts
        self._read_replays = read_replays
        self._read_state = read_state
        self._read_draft_check = read_draft_check
        self._history = history

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not read an engine that has not started

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        yield from _gauges(stats)
        for name, documentation, read in COUNTERS:
            yield CounterMetricFamily(name, documentation, read(stats))
        for name, documentation, label, read_all in LABELLED_COUNTERS:
            counter = CounterMetricFamily(name, documentation, labels=[label])
            for key, value in sorted(read_all(stats).items()):
                counter.add_metric([key], value)
            yield counter
        yield CounterMetricFamily(
            "headway_engine_restarts", "Times the engine process was restarted.", self._read_restarts()
        )
        yield CounterMetricFamily(
            "headway_requests_replayed",
            "Times a request was sent again after the engine had ended, with the tokens that it had got.",
            self._read_replays(),
        )
        described = "1 for the state that the engine is in, 0 for the others."
        yield _one_of("headway_engine_state", described, get_args(State), self._read_state())
        yield _one_of(
            "headway_spec_decode_check_state",
            "1 for what the engine found of the drafter when it started, 0 for the others; failed turns speculation off.",
            get_args(DraftCheckState),
            self._read_draft_check(),
        )
        yield from _recent_speculation(self._history)
        yield _histogram_of(
            "headway_spec_decode_depth",
            "Depth chosen, by round.",
            stats.rounds_by_depth,
            range(MAX_DEPTH + 1),
        )
        yield _histogram_of(
            "headway_tokens_per_round",
            "Tokens that a row got in a round, the bonus token included; its mean is the acceptance length.",
            stats.row_rounds_by_emitted_tokens,
            range(1, MAX_DEPTH + 2),
        )
        yield HistogramMetricFamily(
            "headway_tokens_per_step",
            "Prompt tokens that a step of the engine computed and tokens that it generated.",
            buckets=step_token_buckets(stats),
            sum_value=stats.num_step_tokens,
        )


def _one_of(name: str, documentation: str, states: Iterable[str], current: str) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=["state"])
    for state in states:
        family.add_metric([state], float(state == current))
    return family


def _recent_speculation(history: History) -> Iterator[Metric]:
    """Yields NaN if nothing was drafted, or no round was timed."""
    recent = history.recent(LAST_MINUTE_SECONDS)
    yield GaugeMetricFamily(
        "headway_spec_decode_acceptance_ratio",
        "Accepted drafts over drafts in the last minute.",
        _or_nan(recent.acceptance_ratio),
    )
    yield GaugeMetricFamily(
        "headway_spec_decode_acceptance_length",
        "Tokens that a row got in a round in the last minute, on average, the bonus token included.",
        _or_nan(recent.acceptance_length),
    )
    yield GaugeMetricFamily(
        "headway_spec_decode_estimated_speedup_ratio",
        "Tokens a second of the last minute's rounds over what rounds without drafts would have given, estimated from measured times of rounds.",
        _or_nan(recent.speedup),
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "headway_num_requests_running", "Requests that hold a row.", stats.num_requests_running
    )
    yield GaugeMetricFamily(
        "headway_num_requests_waiting", "Requests that wait for a row.", stats.num_requests_waiting
    )
    yield GaugeMetricFamily(
        "headway_kv_cache_usage_ratio",
        "Blocks owned by requests, some before they need them, over all blocks.",
        kv_cache_usage(stats),
    )
    blocks = GaugeMetricFamily(
        "headway_kv_cache_blocks",
        "KV blocks: all, owned by requests, kept for prefix reuse only.",
        labels=["state"],
    )
    blocks.add_metric(["total"], stats.num_kv_blocks)
    blocks.add_metric(["used"], stats.num_kv_blocks_used)
    blocks.add_metric(["cached"], stats.num_kv_blocks_cached)
    yield blocks
    config = GaugeMetricFamily(
        "headway_cache_config_info",
        "Always 1; its labels are the tokens of a KV block and the number of all blocks.",
        labels=["block_size", "num_gpu_blocks"],
    )
    if stats.num_kv_blocks:  # the engine has reported its sizes
        config.add_metric([str(stats.kv_block_size), str(stats.num_kv_blocks)], 1)
    yield config


def _by_position(values: list[int]) -> Mapping[str, float]:
    return {str(position): value for position, value in enumerate(values, start=1)}


def _histogram_of(name: str, documentation: str, counts: Mapping[int, int], values: range) -> Metric:
    """Returns exact counts of small numbers, one bucket each: {1: 5, 3: 2} -> le=1: 5, le=2: 5, le=3: 7,
    +Inf: 7."""
    buckets, total = [], 0
    for value in values:
        total += counts.get(value, 0)
        buckets.append((f"{value}.0", float(total)))
    assert total == sum(counts.values()), f"{name} has values outside {values}: {counts}"
    buckets.append(("+Inf", float(total)))
    weighted_sum = sum(value * count for value, count in counts.items())
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=weighted_sum)
