"""How many replicas a fleet needs: a policy of Ray Serve's autoscaler, which applies the limits, factors and
delays of `autoscaling_config` to the answer. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

KV_CACHE_USAGE = "kv_cache_usage"  # of a replica, 0 to 1: blocks of requests that run, not of cached prefixes
# Above it requests preempt one another before their rows run out.
TARGET_KV_CACHE_USAGE = 0.8


class _Config(Protocol):
    target_ongoing_requests: float


class Load(Protocol):
    """What Ray tells a policy. total_num_requests: running and waiting ones, in replicas and on the way to
    them. aggregated_metrics: means by name and replica."""

    @property
    def total_num_requests(self) -> float: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def config(self) -> _Config: ...


def by_requests_and_kv_cache(load: Load) -> tuple[float, dict[str, Any]]:
    """Returns the number of replicas that brings requests to target_ongoing_requests each and the KV cache
    to TARGET_KV_CACHE_USAGE, whichever needs more; and no state."""
    used = (load.aggregated_metrics or {}).get(KV_CACHE_USAGE, {})
    by_requests = load.total_num_requests / load.config.target_ongoing_requests
    return max(by_requests, sum(used.values()) / TARGET_KV_CACHE_USAGE), {}
