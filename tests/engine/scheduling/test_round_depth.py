"""What the scheduler asks the depth policy, and what it tells it."""

from __future__ import annotations

import random

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle
from headway_testing.scripted_policy import ScriptedPolicy

from headway.engine.scheduling.depth.costs import RoundLoad
from headway.engine.scheduling.prefill_policy import PrefillPolicy

DEPTH = 3


def device_of(policy: ScriptedPolicy, **options: object) -> ScheduledDevice:
    device = ScheduledDevice(depth=DEPTH, chooses_depth=True, **options)  # type: ignore[arg-type]
    device.scheduler.set_depth_policy(policy)  # type: ignore[arg-type]
    return device


def test_rounds_have_the_depths_that_the_policy_chooses() -> None:
    policy = ScriptedPolicy([3, 0, 2, 0, 0, 1])
    device = device_of(policy)
    request = device.add(20, max_tokens=30)
    plans = [plan for plan in device.drain() if plan.decode_request_ids]
    assert [plan.depth for plan in plans[:6]] == [3, 0, 2, 0, 0, 1]
    assert request.output_token_ids == oracle(request)
    assert [depth for _, depth in policy.told] == [plan.depth for plan in plans]


def test_a_fixed_depth_is_not_chosen_but_its_rounds_are_told() -> None:
    policy = ScriptedPolicy()
    device = ScheduledDevice(depth=2)
    device.scheduler.set_depth_policy(policy)  # type: ignore[arg-type]
    device.add(20, max_tokens=10)
    device.drain()
    assert not policy.asked
    assert {depth for _, depth in policy.told} == {2}


def test_the_policy_chooses_within_the_operators_limit() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy)
    device.add(20, max_tokens=40)
    device.step_until_round()
    device.scheduler.set_depth(1)
    device.step()
    device.scheduler.set_depth(3)
    device.step()
    assert [depths for _, depths in policy.asked][-3:] == [[0, 1, 2, 3], [0, 1], [0, 1, 2, 3]]


def test_a_depth_that_is_fixed_for_a_while_is_not_chosen_then() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy)
    request = device.add(20, max_tokens=60)
    device.step_until_round()
    num_asked = len(policy.asked)
    depths = []
    for depth in (1, 0, 2):
        device.scheduler.fix_depth(depth)
        depths += [device.step()[0].depth for _ in range(2)]
    assert depths == [1, 1, 0, 0, 2, 2]
    assert len(policy.asked) == num_asked
    device.scheduler.fix_depth(None)
    assert device.step()[0].depth == 3
    assert policy.asked[num_asked][1] == [0, 1, 2, 3]
    device.drain()
    assert [depth for _, depth in policy.told][:8] == [3, 1, 1, 0, 0, 2, 2, 3], "it learns from all rounds"
    assert request.output_token_ids == oracle(request)


def test_a_request_has_at_most_its_own_cap() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy)
    request = device.add(20, max_tokens=20, max_draft_tokens=1, temperature=0.7)
    plans = [plan for plan in device.drain() if plan.decode_request_ids]
    assert {plan.depth for plan in plans} == {1}
    assert policy.kinds == [(0.7, False, 1)]
    assert request.output_token_ids == oracle(request)


def test_the_load_is_that_of_the_live_rows() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy, prefix_caching=False)
    device.add(20, max_tokens=40)
    device.add(30, max_tokens=40)
    device.step_until_round()
    assert policy.told[-1] == (RoundLoad(2, 50), 3)
    device.step()
    assert policy.told[-1] == (RoundLoad(2, 58), 3), "four tokens a row: all drafts were accepted"
    assert policy.asked[-1][0] == RoundLoad(2, 58)


@pytest.mark.parametrize("field", [{"num_logprobs": 1}, {"presence_penalty": 0.5}])
def test_rounds_of_rare_kinds_tell_nothing_of_what_rounds_take(field: dict[str, float]) -> None:
    policy = ScriptedPolicy()
    device = device_of(policy)
    device.add(20, max_tokens=4, **field)
    device.step_until_round()
    assert policy.told == [(None, 3)]


def test_no_depth_is_chosen_while_prompts_have_their_turn() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy, prefill_chunk=16)
    device.add(16, max_tokens=60)
    device.step_until_round()
    device.add(100, max_tokens=4)
    kinds = []
    for _ in range(6):
        before = len(policy.asked)
        plan, _ = device.step()
        kinds.append((bool(plan.prefill), len(policy.asked) - before))
    assert kinds == [(True, 0), (False, 1)] * 3


def test_prompts_share_passes_with_rounds_of_all_depths() -> None:
    policy = ScriptedPolicy([3, 3, 1])
    device = device_of(policy, prefill=PrefillPolicy(128, 128, 128, mixed_above_tokens=0))
    device.add(20, max_tokens=60)
    device.step_until_round()
    device.add(200, max_tokens=4)
    plans = [device.step()[0] for _ in range(3)]
    assert [depths for _, depths in policy.asked[-3:]] == [[0, 1, 2, 3]] * 3
    assert [(plan.is_mixed, plan.depth) for plan in plans[:2]] == [(True, 3), (True, 1)]
    assert [load for load, _ in policy.told[-3:-1]] == [RoundLoad(1, 24, 128), RoundLoad(1, 28, 128)]


@pytest.mark.parametrize(("limit", "expected"), [(3, [0, 3]), (2, [0, 2]), (0, [0])])
def test_rounds_of_rare_kinds_have_few_depths_on_a_gpu(limit: int, expected: list[int]) -> None:
    """Their graphs are captured while requests run."""
    policy = ScriptedPolicy()
    device = device_of(policy, device="cuda")
    device.add(20, max_tokens=60, num_logprobs=1)
    device.scheduler.set_depth(limit)
    plan, _ = device.step_until_round()
    assert (policy.asked[-1][1], plan.depth) == (expected, limit)


def test_a_round_that_its_requests_keep_shallow_counts_its_own_tokens() -> None:
    """Two rows without drafts are two tokens, for which no mixed pass was captured, though rounds may have
    eight."""
    policy = ScriptedPolicy()
    device = device_of(policy, prefill=PrefillPolicy(128, 128, 128, mixed_above_tokens=4))
    for _ in range(2):
        device.add(20, max_tokens=60, max_draft_tokens=0)
    device.step_until_round()
    device.add(100, max_tokens=4)
    plans = [device.step()[0] for _ in range(4)]
    assert any(plan.prefill for plan in plans)
    assert not any(plan.is_mixed for plan in plans)


def test_requests_count_while_they_take_part_in_rounds() -> None:
    policy = ScriptedPolicy()
    device = device_of(policy)

    def num_rows() -> list[int]:
        return [sum(p.num_rows[i] for p in policy.acceptance._populations.values()) for i in range(DEPTH)]

    first, capped = device.add(20, max_tokens=40), device.add(20, max_tokens=40, max_draft_tokens=2)
    device.step_until_round()
    assert num_rows() == [2, 2, 1]
    assert device.scheduler.preempt(first.request_id)
    assert num_rows() == [1, 1, 0]
    device.step_until_prompts()
    assert num_rows() == [2, 2, 1]
    device.scheduler.abort(capped.request_id)
    assert num_rows() == [1, 1, 1]
    device.drain()
    assert num_rows() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(4))
def test_depths_that_change_with_every_round_change_no_text(seed: int) -> None:
    """With little memory, so that requests are preempted, and one step unread."""
    chance = random.Random(seed)
    policy = ScriptedPolicy(chance=chance)
    device = device_of(
        policy, num_blocks=24, max_model_len=128, max_running=6, prefill_chunk=32,
        accept=lambda num_valid: chance.randint(0, num_valid),
    )  # fmt: skip
    requests = [
        device.add(
            chance.randint(1, 60),
            max_tokens=chance.randint(1, 60),
            max_draft_tokens=chance.choice([None, None, 0, 2]),
        )
        for _ in range(16)
    ]
    device.drain()
    assert [request.output_token_ids for request in requests] == [oracle(request) for request in requests]
    assert sum(request.num_preemptions for request in requests) > 0
    assert len({depth for _, depth in policy.told}) == 4
