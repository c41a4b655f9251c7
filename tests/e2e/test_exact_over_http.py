"""Answers of real servers, log-probabilities included, are those of a server without drafts to each request
alone."""

from __future__ import annotations

import pytest
from headway_testing.exact_http import FAMILIES, Outcome, check, first_difference, lasting

NUM_REQUESTS = 1000  # of all families, on two numbers of threads
THREADS = [(1, "full"), (2, "full"), (1, "int4"), (2, "int4"), (3, "int4")]  # and what they multiply by


def assert_exact(outcome: Outcome) -> None:
    assert outcome.differences == []
    assert outcome.statuses[200] >= 0.9 * outcome.num_requests, "refused requests compare nothing"
    assert outcome.coverage["drafts accepted"] > 0


@pytest.mark.slow
def test_random_requests_in_a_crowd_get_what_each_gets_alone() -> None:
    assert_exact(check("qwen3", 2, 12, seed=0, settings=["depth 3, preempted"]))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_threads", "cpu_weights"), THREADS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_random_requests_get_what_each_gets_alone(
    family: str, num_threads: int, cpu_weights: str
) -> None:
    """At depths 0, 3, 8 and auto, with n-grams, in crowds and with preemption."""
    share = NUM_REQUESTS // len(FAMILIES) // 2
    outcome = check(family, num_threads, share, seed=1, cpu_weights=cpu_weights)
    assert_exact(outcome)
    assert outcome.coverage["preemptions"] > 0


def test_a_difference_is_told_by_its_place() -> None:
    one = {"id": "a", "choices": [{"logprobs": {"token_logprobs": [-1.5, -2.0]}}]}
    other = {"id": "b", "choices": [{"logprobs": {"token_logprobs": [-1.5, -2.0000001]}}]}
    place = ".choices[0].logprobs.token_logprobs[1]"
    assert first_difference(lasting(one), lasting(other)) == (place, -2.0, -2.0000001)
    assert lasting(one) == lasting(one | {"id": "c"})
