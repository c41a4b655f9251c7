"""How many replicas requests and the KV cache want."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from headway.server.fleet.scaling import KV_CACHE_USAGE, by_requests_and_kv_cache


def wanted(num_requests: float, used: Mapping[Any, float] | None, target: float = 10) -> float:
    load = SimpleNamespace(
        total_num_requests=num_requests,
        aggregated_metrics=None if used is None else {KV_CACHE_USAGE: used},
        config=SimpleNamespace(target_ongoing_requests=target),
    )
    number, state = by_requests_and_kv_cache(load)
    assert state == {}
    return number


@pytest.mark.parametrize(
    ("num_requests", "used", "number"),
    [
        pytest.param(0, {"a": 0.0}, 0.0, id="idle"),
        pytest.param(35, {"a": 0.1}, 3.5, id="requests"),
        pytest.param(2, {"a": 1.0, "b": 1.0}, 2.5, id="a cache that is full"),
        pytest.param(2, {"a": 0.4, "b": 0.4}, 1.0, id="a cache that fits into one"),
        pytest.param(20, {}, 2.0, id="no replica has told anything"),
        pytest.param(20, None, 2.0, id="no statistics"),
    ],
)
def test_what_needs_more_replicas_counts(
    num_requests: float, used: Mapping[Any, float] | None, number: float
) -> None:
    assert wanted(num_requests, used) == pytest.approx(number)


def test_ray_calls_the_policy_with_what_it_reads() -> None:
    config = pytest.importorskip("ray.serve.config")
    context = config.AutoscalingContext(
        None, "Replica", "headway", 1, 1, [], lambda: 30.0, None, lambda: {KV_CACHE_USAGE: {"a": 0.2}}, None, 1, 4,
        {}, None, None, None,
        config.AutoscalingConfig(
            max_replicas=4, target_ongoing_requests=10,
            policy={"policy_function": "headway.server.fleet.scaling:by_requests_and_kv_cache"},
        ),
    )  # fmt: skip
    assert context.config.policy.get_policy()(context)[0] == pytest.approx(3.0)
