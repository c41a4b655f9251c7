"""What the scheduler makes of results: outputs, ends, events, counters, and which blocks others may find."""

from __future__ import annotations

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle

from headway.engine.protocol.errors import INTERNAL_ERROR
from headway.engine.protocol.messages import TokenEvent
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.protocol.stats import STEP_TOKEN_BOUNDS
from headway.engine.scheduling.plan import Plan, StepResult

# --- ends ------------------------------------------------------------------------------------------------


def read_made_up(
    *,
    emitted: tuple[int, ...],
    first: int = 50,
    max_tokens: int = 20,
    stop: tuple[int, ...] = (),
    depth: int = 3,
) -> tuple[ScheduledDevice, list[TokenEvent]]:
    """Returns the events of the prompt and, unless the first token ends the request, of one round, whose
    tokens the test chooses."""
    device = ScheduledDevice(depth=depth)
    scheduler = device.scheduler
    device.add(20, max_tokens=max_tokens, stop=stop)
    plan = scheduler.plan()
    assert plan is not None
    events = scheduler.update(plan, StepResult((first,)))
    plan = scheduler.plan()
    if plan is not None:
        events += scheduler.update(plan, StepResult(emitted=(emitted,)))
    return device, events


@pytest.mark.parametrize(
    ("stop", "max_tokens", "kept", "reason", "drafted", "accepted"),
    [
        ((), 20, [51, 52, 53, 54], None, 3, 3),
        ((54,), 20, [51, 52, 53, 54], FinishReason.STOP, 3, 3),
        ((53,), 20, [51, 52, 53], FinishReason.STOP, 3, 3),
        ((51,), 20, [51], FinishReason.STOP, 3, 1),
        ((53, 52), 20, [51, 52], FinishReason.STOP, 3, 2),
        ((), 5, [51, 52, 53, 54], FinishReason.LENGTH, 3, 3),
        ((54,), 5, [51, 52, 53, 54], FinishReason.STOP, 3, 3),
    ],
    ids=["none", "bonus", "third-draft", "first-draft", "two-stops", "length", "stop-at-length"],
)
def test_output_ends_with_the_first_stop_token_or_at_max_tokens(
    stop: tuple[int, ...],
    max_tokens: int,
    kept: list[int],
    reason: FinishReason | None,
    drafted: int,
    accepted: int,
) -> None:
    device, events = read_made_up(emitted=(51, 52, 53, 54), stop=stop, max_tokens=max_tokens)
    first = TokenEvent(0, [50], queue_seconds=0.0, num_cached=0)
    assert events == [first, TokenEvent(0, kept, reason, drafted, accepted)]
    assert device.scheduler.has_work == (reason is None)


@pytest.mark.parametrize(
    ("stop", "max_tokens", "reason"),
    [((50,), 20, FinishReason.STOP), ((), 1, FinishReason.LENGTH), ((50,), 1, FinishReason.STOP)],
    ids=["stop", "length", "stop-at-length"],
)
def test_the_first_token_may_end_the_output(
    stop: tuple[int, ...], max_tokens: int, reason: FinishReason
) -> None:
    device, events = read_made_up(emitted=(51, 52, 53, 54), stop=stop, max_tokens=max_tokens)
    assert events == [TokenEvent(0, [50], reason, queue_seconds=0.0, num_cached=0)]
    assert not device.scheduler.has_work


@pytest.mark.parametrize(
    ("emitted", "max_tokens", "drafted", "accepted"),
    [((51,), 20, 3, 0), ((51, 52), 20, 3, 1), ((51, 52), 3, 1, 1), ((51,), 2, 0, 0), ((51, 52, 53), 5, 3, 2)],
    ids=str,
)
def test_drafts_count_where_the_limit_lets_them(
    emitted: tuple[int, ...], max_tokens: int, drafted: int, accepted: int
) -> None:
    _, events = read_made_up(emitted=emitted, max_tokens=max_tokens)
    assert [(event.num_drafted, event.num_accepted) for event in events] == [(0, 0), (drafted, accepted)]


@pytest.mark.parametrize("emitted", [(), (51, 52, 53, 54, 55)], ids=["nothing", "more-than-drafted"])
def test_an_impossible_result_ends_the_request_that_it_is_for(emitted: tuple[int, ...]) -> None:
    device, events = read_made_up(emitted=emitted)
    assert [event.token_ids for event in events] == [[50]], "the prompt's own result was possible"
    fault = device.scheduler.drain_faults()[0]
    assert (fault.finish_reason, fault.error_code) == (FinishReason.ERROR, INTERNAL_ERROR)
    assert "with 3 drafts emitted" in (fault.error or "")


@pytest.mark.parametrize("place", [0, 2], ids=["prompt", "round"])
def test_a_step_in_flight_adds_nothing_to_a_request_that_has_ended(place: int) -> None:
    """place: of the stop token in the text; the first token comes of the prompt, the next three of a
    round."""
    device = ScheduledDevice(depth=2)
    probe = device.add(20, max_tokens=30)
    text = oracle(probe)
    device.scheduler.abort(probe.request_id)
    stopped = ScheduledDevice(depth=2)
    request = stopped.add(20, max_tokens=30, stop=(text[place],))
    if place > 0:
        stopped.step()
    stopped.launch()
    stopped.launch()
    assert stopped.read()[0].finish_reason is FinishReason.STOP
    before = stopped.scheduler.snapshot().num_generation_tokens
    assert stopped.read() == []
    assert request.output_token_ids == oracle(request) == text[: place + 1]
    assert stopped.scheduler.snapshot().num_generation_tokens == before == len(request.output_token_ids)


def test_the_row_and_blocks_of_an_ended_request_are_free_for_the_next_plan() -> None:
    device = ScheduledDevice(max_running=1, num_blocks=16, prefix_caching=False)
    device.add(200, max_tokens=2)
    device.add(200, max_tokens=2)
    device.step_until_round()
    plan, _ = device.step()
    assert (plan.released_rows, [s.row for s in plan.setups]) == ((0,), [0])


def test_events_come_in_the_plans_order_prefills_first() -> None:
    device = ScheduledDevice(depth=1, prefill_chunk=64, mixed_above_tokens=0)
    device.add(4, max_tokens=30)
    device.add(4, max_tokens=30)
    device.step()
    device.add(4, max_tokens=30)
    plan, events = device.step()
    assert plan.is_mixed
    assert [event.request_id for event in events] == [2, 0, 1]


def test_a_chunk_that_is_not_the_last_gives_no_event() -> None:
    device = ScheduledDevice(prefill_chunk=16)
    device.add(20)
    assert device.step()[1] == []


# --- counters --------------------------------------------------------------------------------------------


def test_counters_are_those_of_the_events_and_plans() -> None:
    device = ScheduledDevice(depth=3, accept=lambda num_valid: min(2, num_valid), prefill_chunk=16)
    device.add(20, max_tokens=8)  # first token, 3, 3, then 1 at the limit
    device.add(20, max_tokens=4, max_draft_tokens=1)  # first token, 2, 1
    plans: list[Plan] = []
    while device.scheduler.has_work:
        plans.append(device.step()[0])
    stats = device.scheduler.snapshot()
    assert stats.num_steps == len(plans)
    assert stats.rounds_by_depth == {3: sum(1 for plan in plans if plan.decode_request_ids)}
    assert stats.num_generation_tokens == 12
    assert stats.row_rounds_by_emitted_tokens == {3: 2, 2: 1, 1: 2}
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 7, 5)
    assert stats.draft_tokens_per_position == [3, 2, 2]
    assert stats.accepted_tokens_per_position == [3, 2, 0]
    assert stats.finished_by_reason == {"length": 2}
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (40, 0)


def test_steps_count_by_the_tokens_that_they_computed_and_generated() -> None:
    device = ScheduledDevice(depth=3, accept=lambda num_valid: 2, prefill_chunk=64)
    device.add(20, max_tokens=7)
    first, *rounds = [device.step()[0] for _ in range(3)]
    assert (len(first.prefill[0].token_ids), [plan.prefill for plan in rounds]) == (20, [(), ()])
    stats = device.scheduler.snapshot()
    # The first step has the prompt's 20 tokens and 1 generated token, each of the other two has 3 generated
    # tokens.
    assert stats.num_step_tokens == 20 + stats.num_generation_tokens == 27
    by_bound = dict(zip([*STEP_TOKEN_BOUNDS, None], stats.num_steps_by_tokens, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {8: 2, 32: 1}


def test_prompts_are_counted_as_looked_up_where_the_prefix_cache_is_asked() -> None:
    device = ScheduledDevice(depth=0)
    device.add(list(range(40)), max_tokens=2)
    device.drain()
    device.add(list(range(40)), max_tokens=2)
    device.add(30, max_tokens=2, num_prompt_logprobs=0)  # scored from its first token on
    device.drain()
    stats = device.scheduler.snapshot()
    assert (stats.num_prompt_tokens, stats.num_prefix_query_tokens) == (110, 80)
    assert stats.num_cached_prompt_tokens == 32


def test_nothing_is_looked_up_without_prefix_caching() -> None:
    device = ScheduledDevice(depth=0, prefix_caching=False)
    device.add(40, max_tokens=2)
    device.drain()
    stats = device.scheduler.snapshot()
    assert (stats.num_prompt_tokens, stats.num_prefix_query_tokens) == (40, 0)


def test_prompt_tokens_count_once_though_a_preempted_request_is_prefilled_again() -> None:
    device = ScheduledDevice(num_blocks=8, max_model_len=128, depth=1)
    device.add(40, max_tokens=60)
    device.add(40, max_tokens=60)
    device.drain()
    stats = device.scheduler.snapshot()
    assert stats.num_preemptions > 0
    assert (stats.num_prompt_tokens, stats.num_cached_prompt_tokens) == (80, 0)


def test_gauges_say_what_holds_now() -> None:
    device = ScheduledDevice(max_running=1, num_blocks=20, depth=0)
    device.add(40, max_tokens=3)
    device.add(10, max_tokens=3)
    device.step()
    stats = device.scheduler.snapshot()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 1)
    assert (stats.num_kv_blocks, stats.num_kv_blocks_used, stats.num_kv_blocks_cached) == (20, 3, 0)
    device.drain()
    stats = device.scheduler.snapshot()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert (stats.num_kv_blocks_used, stats.num_kv_blocks_cached) == (0, 2)


# --- prefix cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "num_hits"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (64, 3), (65, 3)], ids=str
)
@pytest.mark.parametrize("has_draft_head", [True, False], ids=["mtp", "no-mtp"])
def test_a_hit_covers_full_blocks_but_never_the_last_token(
    length: int, num_hits: int, has_draft_head: bool
) -> None:
    device = ScheduledDevice(depth=2, has_draft_head=has_draft_head, max_model_len=128)
    prompt = [3 * i % 89 for i in range(80)]
    first = device.add(prompt[:63], max_tokens=1)
    device.step()
    second = device.add(prompt[:length])
    plan, _ = device.step()
    chunk = plan.prefill[0]
    assert (chunk.start, second.num_cached) == (16 * num_hits, 16 * num_hits)
    assert (chunk.hidden_block_id is not None) == (has_draft_head and num_hits > 0)
    device.drain()
    assert [r.output_token_ids for r in (first, second)] == [oracle(first), oracle(second)]


def test_only_the_first_chunk_after_a_hit_names_the_block_with_the_state_before_it() -> None:
    device = ScheduledDevice(prefill_chunk=16, num_blocks=16)
    prompt = list(range(70))
    first = device.add(prompt, max_tokens=100)
    for _ in range(5):
        device.step()
    second = device.add(prompt, max_tokens=100)
    chunks = [chunk for _ in range(4) for chunk in device.step()[0].prefill]
    assert [(chunk.start, chunk.hidden_block_id) for chunk in chunks] == [(64, first.block_ids[3])]
    assert second.block_ids[:4] == first.block_ids[:4]
    third = device.add([*prompt[:32], *range(20)])
    chunks = [chunk for _ in range(4) for chunk in device.step()[0].prefill]
    assert [(chunk.start, chunk.hidden_block_id) for chunk in chunks] == [
        (32, first.block_ids[1]),
        (48, None),
    ]
    assert third.num_cached == 32


@pytest.mark.parametrize(
    ("salt", "prefix_caching", "cached"),
    [("a", True, 32), ("b", True, 0), ("", True, 0), ("a", False, 0)],
    ids=["same-salt", "other-salt", "no-salt", "disabled"],
)
def test_prefixes_are_shared_within_a_salt_unless_disabled(
    salt: str, prefix_caching: bool, cached: int
) -> None:
    device = ScheduledDevice(prefix_caching=prefix_caching)
    prompt = list(range(40))
    device.add(prompt, salt="a")
    device.drain()
    request = device.add(prompt, salt=salt)
    device.drain()
    assert request.num_cached == device.scheduler.snapshot().num_cached_prompt_tokens == cached


@pytest.mark.parametrize(
    ("prompt", "depth", "accepted", "starts"),
    [
        (14, 0, 0, [14, 15]),  # no drafts: final once 16 tokens are in the cache
        (14, 1, 0, [14, 15]),  # the round from 15 fills slot 15 with the true pair, and ends at 16
        (14, 3, 3, [14, 18]),  # the round from 14 ends at 18, but slot 15 holds a draft's pair
        (15, 3, 3, [15]),
        (11, 3, 3, [11, 15]),
        (10, 3, 3, [10, 14, 18]),
    ],
    ids=str,
)
def test_a_block_is_published_once_no_draft_can_change_it(
    prompt: int, depth: int, accepted: int, starts: list[int]
) -> None:
    """starts: the lengths at which rounds began until the first block, positions 0 .. 15, was published."""
    device = ScheduledDevice(depth=depth, accept=lambda num_valid: min(accepted, num_valid))
    request = device.add(prompt, max_tokens=50)
    device.step()
    seen: list[int] = []
    while not device.blocks.is_published(request.block_ids[0]):
        seen.append(request.num_tokens - 1)
        device.step()
    assert seen == starts


def test_a_prompts_blocks_are_published_chunk_by_chunk() -> None:
    device = ScheduledDevice(prefill_chunk=24)
    request = device.add(70)
    counts = []
    for _ in range(3):
        device.step()
        counts.append(sum(map(device.blocks.is_published, request.block_ids)))
    assert counts == [1, 3, 4]


def test_what_a_chunk_in_flight_computed_is_not_published_once_its_request_was_preempted() -> None:
    device = ScheduledDevice(prefill_chunk=32)
    request = device.add(70)
    device.launch()
    device.scheduler.state.preempt(request)
    assert device.launch() is None
    device.read()
    assert device.blocks.num_cached == 0
    device.drain()
    assert request.output_token_ids == oracle(request)


def test_a_continuation_finds_the_output_of_the_request_before_it() -> None:
    device = ScheduledDevice(depth=2)
    first = device.add(20, max_tokens=40)
    device.drain()
    second = device.add([*first.prompt_token_ids, *first.output_token_ids, 5, 6])
    first_event, *others = [event for _ in range(3) for event in device.step()[1]]
    assert (first_event.num_cached, {event.num_cached for event in others}) == (48, {None})
    device.drain()
    assert second.num_cached == 48  # 60 tokens, the last never entered the cache
    assert second.output_token_ids == oracle(second)


def test_the_first_event_tells_how_long_the_request_queued() -> None:
    times = iter([10.0, 12.5])
    device = ScheduledDevice(depth=0)
    device.scheduler.state.clock = lambda: next(times)
    device.add([1, 2, 3], max_tokens=3)
    events = [event for _ in range(2) for event in device.step()[1]]
    assert [event.queue_seconds for event in events] == [2.5, None]
