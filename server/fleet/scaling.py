"""The number of replicas that a fleet needs: a policy of Ray Serve's autoscaler, which applies the limits,
factors and delays of `autoscaling_config` to the result. This module knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

KV_CACHE_USAGE = (
    "kv_cache_usage"  # of a replica, 0 to 1: the blocks of running requests, without cached prefixes
)
# Above this usage requests preempt one another although rows are free.
TARGET_KV_CACHE_USAGE = 0.8


class _Config(Protocol):
    target_ongoing_requests: float


class Load(Protocol):
    """The information that Ray gives a policy. total_num_requests: running and waiting requests, in
    replicas and on the way to them. aggregated_metrics: means by name and replica."""

    @property
    def total_num_requests(self) -> float: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def config(self) -> _Config: ...


def by_requests_and_kv_cache(load: Load) -> tuple[float, dict[str, Any]]:
    """Returns the number of replicas, and no state: as many as bring each to target_ongoing_requests
    requests and its KV cache to TARGET_KV_CACHE_USAGE, whichever needs more."""
    used = (load.aggregated_metrics or {}).get(KV_CACHE_USAGE, {})
    by_requests = load.total_num_requests / load.config.target_ongoing_requests
    return max(by_requests, sum(used.values()) / TARGET_KV_CACHE_USAGE), {}
