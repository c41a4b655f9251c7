"""Where prompts and generated tokens are computed in different ways, each chunk has tokens of one kind, on a
fixed grid."""

from __future__ import annotations

import random

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle

from headway.engine.scheduling.plan import Plan, PrefillChunk, chunk_end
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.request import Request

GRID = 64


def chunks_of(plans: list[Plan]) -> list[PrefillChunk]:
    return [chunk for plan in plans for chunk in plan.prefill]


def check_chunk(chunk: PrefillChunk, request: Request) -> None:
    length, end = len(request.prompt_token_ids), chunk.start + len(chunk.token_ids)
    if chunk.is_generated:
        assert chunk.start >= length
    else:
        assert chunk.start % GRID == 0
        assert end == length or (end < length and end % GRID == 0)


def run_schedule(chance: random.Random) -> tuple[list[Plan], list[Request]]:
    """Requests that share beginnings, some of them the next turns of others, in few blocks, at any budget."""
    device = ScheduledDevice(
        num_checkpoints=chance.choice([1, 3, 12]),
        prompt_grid=GRID,
        num_blocks=chance.choice([26, 40, 128]),
        max_model_len=400,
        max_running=chance.choice([2, 4]),
        prefill_chunk=chance.choice([64, 70, 100, 200, 512]),
        accept=lambda num_valid: chance.randint(0, num_valid),
    )
    plans: list[Plan] = []
    requests: list[Request] = []
    while len(requests) < 15 or device.scheduler.has_work or device.has_unread:
        if len(requests) < 15 and chance.random() < 0.2:
            prompt = [chance.choice([1, 2])] * chance.choice([5, 63, 64, 65, 128, 200]) + [
                len(requests)
            ] * chance.randint(1, 70)
            if requests and chance.random() < 0.4:
                last = chance.choice(requests)
                prompt = [*last.prompt_token_ids, *last.output_token_ids, len(requests)][-290:]
            requests.append(device.add(prompt, max_tokens=chance.randint(1, 100)))
        is_late = device.has_unread
        if (plan := device.launch()) is not None:
            plans.append(plan)
            for chunk in plan.prefill:
                check_chunk(chunk, requests[chunk.request_id])
        if is_late or (device.has_unread and chance.random() < 0.3):
            device.read()
    for request in requests:
        assert request.output_token_ids == oracle(request)
    return plans, requests


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.long)])
def test_no_chunk_has_tokens_of_both_kinds(seeds: range) -> None:
    generated = saved = restored = cut = 0
    for seed in seeds:
        plans, _ = run_schedule(random.Random(seed))
        generated += sum(chunk.is_generated for chunk in chunks_of(plans))
        saved += sum(len(plan.saves) for plan in plans)
        restored += sum(setup.checkpoint is not None for plan in plans for setup in plan.setups)
        cut += sum(not chunk.is_last for chunk in chunks_of(plans))
    assert min(generated, saved, restored, cut) > 0


def test_what_a_request_generated_is_not_found_by_others() -> None:
    """A block of generated tokens holds other bits than the same tokens have in a prompt."""
    device = ScheduledDevice(num_checkpoints=8, prompt_grid=GRID, prefill_chunk=512)
    first = device.add(130, max_tokens=100)
    device.drain()
    turn = device.add([*first.prompt_token_ids, *first.output_token_ids, 5], max_tokens=2)
    device.drain()
    assert turn.num_cached == 128
    again = device.add([*first.prompt_token_ids, *first.output_token_ids, 6], max_tokens=2)
    device.drain()
    assert again.num_cached == 192, "the second turn's prompt is found"


def test_a_request_finds_no_prompt_of_others_in_what_it_generated() -> None:
    """The second request's prompt is the first one's text, which is preempted after that was published."""
    device = ScheduledDevice(num_checkpoints=8, prompt_grid=GRID, prefill_chunk=512, max_model_len=256)
    first = device.add(70, max_tokens=150, max_draft_tokens=0)
    while len(first.output_token_ids) < 130:
        device.step()
    device.add([*first.prompt_token_ids, *first.output_token_ids], max_tokens=1)
    while device.scheduler.num_running > 1 or device.scheduler.num_waiting:
        device.step()
    device.scheduler.state.preempt(first)
    plans = device.drain()
    chunks = [chunk for chunk in chunks_of(plans) if chunk.request_id == first.request_id]
    assert [(chunk.start, chunk.is_generated) for chunk in chunks] == [(64, False), (70, True)]
    assert first.output_token_ids == oracle(first)


@pytest.mark.parametrize(
    ("start", "budget", "end"),
    [
        (0, 63, 0),
        (0, 64, 64),
        (0, 127, 64),
        (64, 80, 128),
        (64, 100, 150),
        (128, 22, 150),
        (128, 100, 150),
        (150, 7, 157),
    ],
)
def test_a_chunk_ends_on_the_grid_or_with_the_prompt(start: int, budget: int, end: int) -> None:
    request = ScheduledDevice().add(150, max_tokens=20)
    request.output_token_ids = list(range(10))
    request.num_computed = start
    assert chunk_end(request, budget, GRID) == end
    assert chunk_end(request, budget, None) == min(start + budget, 160)


def test_steps_shorter_than_the_grid_are_refused() -> None:
    with pytest.raises(AssertionError, match="steps of 32 prompt tokens are shorter than a grid of 64"):
        ScheduledDevice(prompt_grid=GRID, prefill=PrefillPolicy(64, 32, 64))
