"""Which checkpoints exist for prefix hits, and what becomes of them."""

from __future__ import annotations

import random

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle

from headway.engine.scheduling.blocks import BlockAllocator
from headway.engine.scheduling.checkpoints import Checkpoints
from headway.engine.scheduling.plan import Plan
from headway.engine.scheduling.request import Request

A, B, C = b"a", b"b", b"c"


def keep(checkpoints: Checkpoints, request_id: int, key: bytes) -> int | None:
    """Takes a checkpoint after 16 tokens and publishes its block."""
    checkpoint = checkpoints.take(request_id, 16)
    if checkpoint is not None:
        checkpoints.keep(request_id, 16, key)
    return checkpoint


def test_the_one_used_longest_ago_makes_room() -> None:
    checkpoints = Checkpoints(2)
    first, second = keep(checkpoints, 1, A), keep(checkpoints, 2, B)
    assert {first, second} == {0, 1}
    assert checkpoints.use(A) == first
    assert keep(checkpoints, 3, C) == second
    assert (checkpoints.has(A), checkpoints.has(B), checkpoints.has(C)) == (True, False, True)


def test_pending_ones_are_not_taken() -> None:
    checkpoints = Checkpoints(1)
    assert checkpoints.take(1, 16) == 0
    assert checkpoints.take(2, 16) is None
    checkpoints.drop_pending(1)
    assert checkpoints.take(2, 16) == 0
    assert Checkpoints(0).take(1, 16) is None


def test_a_block_has_one_at_most() -> None:
    checkpoints = Checkpoints(2)
    first = keep(checkpoints, 1, A)
    keep(checkpoints, 2, A)
    assert (checkpoints.num_kept, checkpoints.use(A)) == (1, first)
    assert checkpoints.take(3, 16) is not None, "the other one is free again"


def test_evicted_and_unpublished_blocks_lose_theirs() -> None:
    checkpoints = Checkpoints(3)
    blocks = BlockAllocator(2, on_unpublish=checkpoints.drop)
    block_ids = blocks.allocate(2)
    assert block_ids is not None
    for request_id, (block_id, key) in enumerate(zip(block_ids, (A, B), strict=True)):
        blocks.publish(block_id, key)
        keep(checkpoints, request_id, key)
    blocks.unpublish(block_ids[:1])
    assert (checkpoints.has(A), checkpoints.has(B)) == (False, True)
    blocks.free(block_ids)
    assert checkpoints.has(B), "the block is unused, but still published"
    blocks.allocate(2)
    assert checkpoints.num_kept == 0


def check_places(device: ScheduledDevice, num_checkpoints: int) -> None:
    """Every checkpoint is free, pending, or kept for a block that can be found."""
    checkpoints = device.scheduler.state.prefixes._checkpoints
    assert checkpoints is not None
    pending = [place for by_length in checkpoints._pending.values() for place in by_length.values()]
    places = [*checkpoints._free, *pending, *checkpoints._kept.values()]
    assert sorted(places) == list(range(num_checkpoints))
    assert all(device.blocks.find(key) is not None for key in checkpoints._kept)
    assert not pending or device.has_unread, "nothing can be pending once every step is read"


def run_schedule(chance: random.Random) -> tuple[list[Plan], list[Request]]:
    """Requests that share beginnings, some of them the next turns of others, in few blocks; the device checks
    the row state with which each goes on. Some are aborted while a step is unread."""
    num_checkpoints = chance.choice([1, 2, 4, 12])
    device = ScheduledDevice(
        num_checkpoints=num_checkpoints,
        num_blocks=chance.choice([12, 20, 64]),
        max_model_len=160,
        max_running=chance.choice([2, 4]),
        prefill_chunk=chance.choice([16, 20, 48, 512]),
        accept=lambda num_valid: chance.randint(0, num_valid),
    )
    plans: list[Plan] = []
    requests: list[Request] = []
    aborted: set[int] = set()
    while len(requests) < 25 or device.scheduler.has_work or device.has_unread:
        if len(requests) < 25 and chance.random() < 0.3:
            prompt = [chance.choice([1, 2])] * chance.choice([5, 33, 48, 64]) + [
                len(requests)
            ] * chance.randint(1, 30)
            if requests and chance.random() < 0.4:
                last = chance.choice(requests)
                prompt = [*last.prompt_token_ids, *last.output_token_ids, len(requests)][-110:]
            requests.append(device.add(prompt, max_tokens=chance.randint(1, 40)))
        is_late = device.has_unread
        if (plan := device.launch()) is not None:
            plans.append(plan)
        if requests and chance.random() < 0.05 and requests[-1].finish_reason is None:
            aborted.add(requests[-1].request_id)
            device.scheduler.abort(requests[-1].request_id)
        if is_late or (device.has_unread and chance.random() < 0.3):
            device.read()
        check_places(device, num_checkpoints)
    for request in requests:
        assert request.request_id in aborted or request.output_token_ids == oracle(request)
    return plans, requests


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 100), marks=pytest.mark.long)])
def test_rows_go_on_from_the_state_of_their_own_prefix(seeds: range) -> None:
    num_saved = num_restored = num_preempted = 0
    for seed in seeds:
        plans, requests = run_schedule(random.Random(seed))
        num_saved += sum(len(plan.saves) for plan in plans)
        num_restored += sum(setup.checkpoint is not None for plan in plans for setup in plan.setups)
        num_preempted += sum(request.num_preemptions for request in requests)
    assert min(num_saved, num_restored, num_preempted) >= len(seeds) // 2


def test_models_without_row_state_plan_whole_prompts_and_no_checkpoints() -> None:
    device = ScheduledDevice()
    prompt = [1] * 70
    for num_cached in (0, 64):
        request = device.add(prompt, max_tokens=2)
        plans = device.drain()
        chunks = [chunk for plan in plans for chunk in plan.prefill]
        assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks] == [(num_cached, 70 - num_cached)]
        assert request.num_cached == num_cached
        assert not any(plan.saves for plan in plans)
        assert all(setup.checkpoint is None for plan in plans for setup in plan.setups)
