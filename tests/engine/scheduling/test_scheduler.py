"""Admission, chunks, rows, grants and preemption, rule by rule."""

from __future__ import annotations

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle

from headway.engine.protocol.errors import QueueFullError, RequestError
from headway.engine.protocol.sampling_params import FinishReason
from headway.engine.scheduling.plan import Plan, RowMove
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.scheduling.request import Status

# --- queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "code", "words"),
    [(0, "invalid_value", "0 tokens"), (65, "context_length_exceeded", "65 tokens, the limit is 64")],
    ids=["empty", "leaves-no-room-for-a-token"],
)
def test_a_prompt_that_cannot_be_served_is_refused(length: int, code: str, words: str) -> None:
    device = ScheduledDevice(max_model_len=64)
    with pytest.raises(RequestError, match=words) as caught:
        device.add(length, max_tokens=1)
    assert (caught.value.code, caught.value.param) == (code, "prompt")
    assert not device.scheduler.has_work


def test_the_longest_prompt_that_leaves_room_is_served() -> None:
    device = ScheduledDevice(max_model_len=64, num_blocks=4)
    request = device.add(64, max_tokens=1)
    device.drain()
    assert request.output_token_ids == oracle(request)


def test_max_tokens_beyond_the_context_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="limit 64 of 64"):
        ScheduledDevice(max_model_len=64).add(10, max_tokens=55)


def test_too_few_blocks_for_one_request_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="cannot hold one request of 256"):
        ScheduledDevice(num_blocks=15)


def test_a_full_queue_refuses_and_takes_again_after_an_admission() -> None:
    device = ScheduledDevice(max_waiting=2, max_running=1)
    device.add(4)
    device.add(4)
    with pytest.raises(QueueFullError, match=r"2 requests wait, the limit is 2 \(max_waiting\)"):
        device.add(4)
    device.step()
    device.add(4)
    assert (device.scheduler.num_running, device.scheduler.num_waiting) == (1, 2)


def test_the_depth_can_be_set_while_requests_run() -> None:
    device = ScheduledDevice(max_model_len=512, num_blocks=64, depth=3)
    request = device.add(20, max_tokens=400)
    device.step()
    for depth, num_rounds in ((0, 3), (3, 2), (0, 150), (2, 5), (0, 1), (1, 4), (3, 4)):
        device.scheduler.set_depth(depth)
        plans = [device.step_until_round()[0] for _ in range(num_rounds)]
        assert {plan.depth for plan in plans} == {depth}
    device.drain()
    assert request.output_token_ids == oracle(request)
    with pytest.raises(AssertionError, match="depth is 4"):
        device.scheduler.set_depth(4)


def test_the_drafter_catches_up_when_its_pairs_have_no_place_or_drafts_begin() -> None:
    device = ScheduledDevice(max_model_len=512, num_blocks=64, depth=3)
    device.add(20, max_tokens=400)
    device.step()
    device.scheduler.set_depth(0)
    plans = [device.step_until_round()[0] for _ in range(200)]
    assert [i for i, plan in enumerate(plans) if plan.catches_up] == [63, 126, 189]
    device.scheduler.set_depth(1)
    assert [device.step_until_round()[0].catches_up for _ in range(3)] == [True, False, False]
    for num_rounds, expected in ((1, False), (2, False), (3, True)):
        device.scheduler.set_depth(0)
        for _ in range(num_rounds):
            assert not device.step_until_round()[0].catches_up
        device.scheduler.set_depth(1)
        assert device.step_until_round()[0].catches_up == expected, num_rounds


def test_blocks_are_published_once_the_drafter_has_caught_up() -> None:
    device = ScheduledDevice(max_model_len=512, num_blocks=64, depth=3)
    device.scheduler.set_depth(0)
    first = device.add(20, max_tokens=100)
    device.drain()
    known = [*first.prompt_token_ids, *first.output_token_ids]
    again = device.add(known[:110], max_tokens=4)
    device.step()
    assert again.num_cached == 80, "a catch-up at length 83 was the last"
    device.scheduler.set_depth(3)
    device.drain()
    assert again.output_token_ids == oracle(again)


@pytest.mark.parametrize("num_prompt", range(17, 33))
def test_a_block_is_published_with_all_slots_wherever_a_catch_up_ends(num_prompt: int) -> None:
    device = ScheduledDevice(max_model_len=512, num_blocks=64, depth=3)
    request = device.add(num_prompt, max_tokens=100)
    device.scheduler.set_depth(0)
    plans = []
    for _ in range(80):
        plans.append(device.step()[0])
        published = [b for b in request.block_ids if device.blocks.is_published(b)]
        assert all(device.runner.is_complete(b, with_draft_head=True) for b in published)
    assert sum(plan.catches_up for plan in plans) == 1
    assert len(published) == (num_prompt + 63) // 16, "a catch-up leaves out the newest pair"
    device.scheduler.set_depth(3)
    device.drain()
    assert request.output_token_ids == oracle(request)


def test_an_idle_scheduler_plans_nothing() -> None:
    device = ScheduledDevice()
    assert device.launch() is None
    assert not device.scheduler.has_work


# --- prefill ---------------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_to_the_budget_and_short_ones_share_a_step() -> None:
    device = ScheduledDevice(prefill_chunk=32, depth=0)
    for length in (70, 10, 12, 9):
        device.add(length)
    steps = [
        [(c.request_id, c.start, len(c.token_ids), c.is_last) for c in device.step_until_prompts()[0].prefill]
        for _ in range(4)
    ]
    assert steps == [
        [(0, 0, 32, False)],
        [(0, 32, 32, False)],
        [(0, 64, 6, True), (1, 0, 10, True), (2, 0, 12, True), (3, 0, 4, False)],
        [(3, 4, 5, True)],
    ]


def test_a_request_takes_no_row_or_blocks_before_a_step_has_room_for_its_tokens() -> None:
    device = ScheduledDevice(prefill_chunk=32)
    device.add(64)
    late = device.add(10)
    device.step()
    device.step()
    assert (late.status, late.row, late.block_ids) == (Status.WAITING, None, [])
    device.step_until_prompts()
    assert late.status is Status.RUNNING


def let_rows_decode(device: ScheduledDevice, num_rows: int) -> None:
    """Adds requests whose texts end late, computes their prompts and runs their first round."""
    for _ in range(num_rows):
        device.add(5, max_tokens=100)
    device.step_until_round()


def test_chunks_are_longer_while_no_row_decodes() -> None:
    device = ScheduledDevice(prefill=PrefillPolicy(48, 16, 16))
    device.add(90, max_tokens=20)
    assert [len(device.step()[0].prefill[0].token_ids) for _ in range(2)] == [48, 42]
    device.add(60)
    assert len(device.step_until_prompts()[0].prefill[0].token_ids) == 16


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, [(48, False), (48, False), (48, False), (16, False)]),
        (2, [(32, True), (32, True), (32, True), (32, True), (32, False)]),
    ],
    ids=["small-round", "large-round"],
)
def test_chunks_are_short_only_where_they_share_the_pass_of_a_round(
    num_rows: int, expected: list[tuple[int, bool]]
) -> None:
    prefill = PrefillPolicy(64, 48, 32, mixed_above_tokens=4, max_mixed_keys=96)
    device = ScheduledDevice(max_model_len=512, num_blocks=256, depth=3, prefill=prefill)
    let_rows_decode(device, num_rows)
    device.add(160, max_tokens=9)
    plans = [device.step_until_prompts()[0] for _ in expected]
    assert [(len(plan.prefill[0].token_ids), plan.is_mixed) for plan in plans] == expected


def test_the_first_prompt_decides_how_many_tokens_a_step_takes() -> None:
    prefill = PrefillPolicy(48, 40, 32, mixed_above_tokens=4, max_mixed_keys=96)
    device = ScheduledDevice(max_model_len=512, num_blocks=256, depth=3, prefill=prefill)
    known = list(range(90))
    device.add(known, max_tokens=1)
    device.drain()
    let_rows_decode(device, 2)
    device.add(20, max_tokens=9)
    device.add([*known, *known], max_tokens=9)
    plan = device.step()[0]
    assert plan.is_mixed
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] == [(0, 20), (80, 12)]


def test_the_policy_of_prompts_can_be_set_between_steps() -> None:
    device = ScheduledDevice(prefill=PrefillPolicy.uniform(64))
    device.add(200)
    first, _ = device.step()
    own = device.scheduler.prefill
    device.scheduler.set_prefill(PrefillPolicy.uniform(24))
    second, _ = device.step()
    device.scheduler.set_prefill(own)
    third, _ = device.step()
    assert [len(plan.prefill[0].token_ids) for plan in (first, second, third)] == [64, 24, 64]


def test_held_rounds_wait_until_all_prompts_are_computed() -> None:
    """The chunks are of the longer kind, since no row decodes meanwhile."""
    device = ScheduledDevice(prefill=PrefillPolicy(48, 16, 16), depth=1)
    device.scheduler.hold_rounds()
    device.runner.may_hold_rounds = True
    requests = [device.add(40, max_tokens=12) for _ in range(3)]
    plans = [device.step()[0] for _ in range(3)]
    assert [sum(len(chunk.token_ids) for chunk in plan.prefill) for plan in plans] == [48, 48, 24]
    assert [plan.decode_request_ids for plan in plans] == [(), (), ()]
    assert [len(request.output_token_ids) for request in requests] == [1, 1, 1]
    assert device.launch() is None
    device.scheduler.release_rounds()
    device.runner.may_hold_rounds = False
    assert device.step()[0].decode_request_ids == (0, 1, 2)
    device.drain()
    assert [request.output_token_ids for request in requests] == [oracle(request) for request in requests]


def test_a_chunk_carries_its_own_tokens() -> None:
    device = ScheduledDevice(prefill_chunk=16)
    request = device.add(40)
    chunks = [device.step()[0].prefill[0] for _ in range(3)]
    assert [token for chunk in chunks for token in chunk.token_ids] == request.prompt_token_ids


@pytest.mark.parametrize("num_unread", [0, 1])
def test_rounds_and_the_chunks_of_a_long_prompt_take_turns(num_unread: int) -> None:
    """It takes 7 chunks of 16 tokens; the last has room for the prompt of the third request. num_unread:
    steps that are launched and not yet read while the next one is planned."""
    device = ScheduledDevice(prefill_chunk=16, depth=1)
    requests = [device.add(4, max_tokens=60)]
    device.step()
    requests += [device.add(100), device.add(4, max_tokens=60)]
    plans: list[Plan | None] = []
    for place in range(15):
        plans.append(device.launch())
        if place >= num_unread:
            device.read()
    steps = [(len(plan.prefill), plan.decode_request_ids) for plan in plans if plan is not None]
    assert steps == [(0, (0,)), (1, ())] * 6 + [(0, (0,)), (2, ()), (0, (0, 1, 2))]
    device.drain()
    assert [r.output_token_ids for r in requests] == [oracle(r) for r in requests]


def test_neither_rounds_nor_prompts_starve_while_prompts_keep_coming() -> None:
    """A prompt comes before each step and fills it, so that there are always chunks to compute and rows to
    decode."""
    device = ScheduledDevice(prefill_chunk=16, depth=1, num_blocks=256, max_running=64)
    requests = [device.add(16, max_tokens=60)]
    device.step()
    plans: list[Plan] = []
    for _ in range(20):
        requests.append(device.add(16, max_tokens=60))
        plans.append(device.step()[0])
    assert [bool(plan.decode_request_ids) for plan in plans] == [True, False] * 10
    assert [bool(plan.prefill) for plan in plans] == [False, True] * 10
    assert len(requests[0].output_token_ids) == 21, "its prompt gave 1, each of 10 rounds 2"
    assert [bool(r.output_token_ids) for r in requests] == [True] * 11 + [False] * 10
    device.drain()
    assert [r.output_token_ids for r in requests] == [oracle(r) for r in requests]


def test_a_prefilling_row_among_live_ones_is_padding() -> None:
    device = ScheduledDevice(prefill_chunk=16, depth=0)
    device.add(4, max_tokens=60)
    middle = device.add(4)
    device.add(4, max_tokens=60)
    device.step()
    device.scheduler.abort(middle.request_id)
    device.add(40)
    rounds = [device.step_until_round()[0].decode_request_ids for _ in range(4)]
    assert rounds == [(0, None, 2), (0, None, 2), (0, None, 2), (0, 3, 2)]


@pytest.mark.parametrize("mixes", [False, True])
def test_the_first_round_of_a_row_is_the_step_after_its_prompt(mixes: bool) -> None:
    """The prompt's own pass or its mixed pass gives the first token, and the round that follows gives the
    next ones."""
    options = {"mixed_above_tokens": 0} if mixes else {}
    device = ScheduledDevice(depth=2, **options)
    let_rows_decode(device, 1)
    request = device.add(20)
    plan, events = device.step()
    assert plan.prefill[0].is_last
    assert plan.decode_request_ids == ((0,) if mixes else ())
    assert events[0].token_ids == oracle(request)[:1]
    plan, events = device.step()
    assert (plan.prefill, plan.decode_request_ids) == ((), (0, 1))
    assert events[1].token_ids == oracle(request)[1:4]


# --- rounds ----------------------------------------------------------------------------------------------


def test_a_request_for_one_token_never_joins_a_round() -> None:
    device = ScheduledDevice()
    request = device.add(20, max_tokens=1)
    plan, events = device.step()
    assert plan.decode_request_ids == ()
    assert (events[0].token_ids, events[0].finish_reason) == (oracle(request), FinishReason.LENGTH)
    assert not device.scheduler.has_work


def test_a_row_that_is_certain_to_reach_its_limit_is_left_out() -> None:
    """The prompt of the first request gives one of its two tokens; the round that follows is certain to give
    the other."""
    device = ScheduledDevice(depth=0)
    device.add(20, max_tokens=2)
    device.add(20, max_tokens=9)
    plans = [device.launch(), device.launch()]
    device.read()
    plans.append(device.launch())
    assert [plan.decode_request_ids for plan in plans if plan] == [(), (0, 1), (None, 1)]


def test_there_is_no_step_when_all_rows_are_certain_to_end() -> None:
    device = ScheduledDevice(depth=0)
    device.add(20, max_tokens=2)
    device.launch()
    device.launch()
    device.read()
    assert device.launch() is None
    assert device.scheduler.has_work
    assert device.read()[0].finish_reason is FinishReason.LENGTH


def test_a_row_that_may_or_may_not_end_takes_part() -> None:
    device = ScheduledDevice(depth=3, accept=lambda num_valid: num_valid)
    request = device.add(20, max_tokens=4)
    device.step()
    device.launch()
    second = device.launch()
    assert second is not None
    assert second.decode_request_ids == (0,)
    assert device.read()[0].token_ids == oracle(request)[1:]
    assert device.read() == []


@pytest.mark.parametrize(
    ("depth", "has_draft_head", "expected"), [(3, True, 3), (0, True, 0), (3, False, 0)], ids=str
)
def test_without_a_head_rounds_have_depth_zero(depth: int, has_draft_head: bool, expected: int) -> None:
    device = ScheduledDevice(depth=depth, has_draft_head=has_draft_head)
    request = device.add(20)
    assert {plan.depth for plan in device.drain()} == {expected}
    assert request.output_token_ids == oracle(request)


@pytest.mark.parametrize(("cap", "expected"), [(None, 3), (0, 0), (2, 2), (7, 3)], ids=str)
def test_a_request_caps_its_own_depth(cap: int | None, expected: int) -> None:
    device = ScheduledDevice(depth=3)
    device.add(20, max_draft_tokens=cap, max_tokens=9)
    plan, _ = device.step()
    assert (plan.setups[0].depth_cap, plan.setups[0].limit) == (expected, 28)
    _, events = device.step_until_round()
    assert (events[0].num_drafted, len(events[0].token_ids)) == (expected, 1 + expected)


def test_a_round_is_as_deep_as_its_deepest_row() -> None:
    device = ScheduledDevice(depth=3)
    for cap, expected in ((0, 0), (2, 2), (1, 2), (None, 3)):
        device.add(20, max_draft_tokens=cap, max_tokens=40)
        device.step()
        plan, _ = device.step_until_round()
        assert plan.depth == expected
    assert device.scheduler.snapshot().rounds_by_depth == {0: 1, 2: 2, 3: 1}


# --- blocks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "depth", "max_tokens", "grants"),
    [
        (10, 3, 60, [1, 0, 1, 0]),  # 10 + 4 tokens; then 10 + 4 unread + 4: a second block
        (12, 3, 60, [1, 0, 1, 0]),  # 12 + 4 = 16: just fits
        (13, 3, 60, [2, 0, 0, 0]),
        (13, 3, 4, [1, 0, 0, 0]),  # the limit, 16, is covered
        (13, 3, 5, [2, 0, 0, 0]),
        (16, 0, 60, [2, 0, 0, 0]),
        (14, 0, 60, [1, 0, 0, 1]),  # positions 14, 15, then 16
        (14, 0, 3, [1, 0, 0, None]),
        (64, 8, 2, [5, 0, None, None]),
    ],
    ids=str,
)
def test_blocks_cover_the_next_round_if_all_unread_drafts_stay(
    prompt: int, depth: int, max_tokens: int, grants: list[int | None]
) -> None:
    """grants: new blocks in each of the first steps, where none are to spare; None where there is no step.
    The first step computes the prompt, the others run rounds. Each is planned before the one before it is
    read."""
    device = ScheduledDevice(depth=depth, accept=lambda num_valid: 0)
    device.blocks.allocate(32)
    device.add(prompt, max_tokens=max_tokens)
    plans = [device.launch()]
    for _ in range(3):
        plans.append(device.launch())
        if plans[-2] is not None:
            device.read()
    counts = [None if plan is None else sum(len(g.block_ids) for g in plan.grants) for plan in plans]
    assert counts == grants


@pytest.mark.parametrize("num_taken", [0, 29, 32])
@pytest.mark.parametrize("accepted", [0, 4], ids=["none-accepted", "all-accepted"])
def test_a_request_never_holds_more_than_its_limit_needs(accepted: int, num_taken: int) -> None:
    device = ScheduledDevice(depth=4, accept=lambda num_valid: min(accepted, num_valid))
    device.blocks.allocate(num_taken)
    device.add(20, max_tokens=45)
    grants = [grant for plan in device.drain() for grant in plan.grants]
    assert sum(len(grant.block_ids) for grant in grants) == 4  # limit 64


@pytest.mark.parametrize(
    ("num_taken", "num_idle", "counts"),
    [
        (0, 0, [10, 4]),  # 20 tokens and a round of 5 take 2 blocks, a limit of 219 14; 8 of the 12 are spare
        (20, 0, [10, 2, 1, 1]),
        (20, 9, [10, 2, 1, 1]),  # known prefixes that nobody uses are as good
        (24, 0, [8, 1, 1, 1, 1, 1, 1]),  # 40 are free: 8 more than half of all
        (32, 0, [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
    ids=str,
)
def test_spare_blocks_save_grants_while_half_of_the_cache_is_left(
    num_taken: int, num_idle: int, counts: list[int]
) -> None:
    device = ScheduledDevice(depth=4)
    device.blocks.allocate(num_taken)
    idle = device.blocks.allocate(num_idle)
    assert idle is not None
    for block_id in idle:
        device.blocks.publish(block_id, bytes([block_id]))
    device.blocks.free(idle)
    device.add(20, max_tokens=200)
    grants = [grant for plan in device.drain() for grant in plan.grants]
    assert [len(grant.block_ids) for grant in grants] == counts
    assert device.blocks.num_used == num_taken


def test_half_of_an_odd_number_of_blocks_is_the_lesser_half() -> None:
    """20 tokens and a round of 5 take 2 of 21 blocks, 10 are left, 9 are spare, of which it takes 8."""
    for num_blocks, num_spare in ((21, 8), (20, 8), (19, 8), (18, 7), (17, 7), (16, 6)):
        device = ScheduledDevice(depth=4, num_blocks=num_blocks)
        request = device.add(20, max_tokens=200)
        device.step()
        assert len(request.block_ids) == 2 + num_spare


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
def test_spare_blocks_are_for_as_many_tokens_whatever_their_size(block_size: int) -> None:
    device = ScheduledDevice(depth=0, max_model_len=4096, num_blocks=512, block_size=block_size)
    request = device.add(20, max_tokens=2000)
    device.step()
    assert len(request.block_ids) == -(-21 // block_size) + 128 // block_size


@pytest.mark.parametrize("waits_first", [False, True])
def test_spare_blocks_do_not_hold_up_a_waiting_request(waits_first: bool) -> None:
    """Its prompt takes all blocks except those that the running request needs."""
    device = ScheduledDevice(num_blocks=32, max_model_len=512, depth=0, prefill_chunk=4096)
    device.add(20, max_tokens=230)
    if not waits_first:
        device.step()
    large = device.add(440)
    device.step_until_prompts()
    assert large.status is Status.RUNNING
    device.drain()


def test_no_request_is_preempted_while_others_have_spare_blocks() -> None:
    device = ScheduledDevice(num_blocks=32, max_model_len=512, depth=0, prefix_caching=False)
    first = device.add(20, max_tokens=120)
    device.step()
    assert len(first.block_ids) == 9, "as many as it may come to need"
    others = [device.add(n, max_tokens=8) for n in (230, 150)]
    device.step_until_prompts()
    assert [r.status for r in others] == [Status.RUNNING, Status.RUNNING]
    assert len(first.block_ids) == 2
    device.drain()
    assert [r.num_preemptions for r in (first, *others)] == [0, 0, 0]


def test_a_row_grows_into_what_others_have_to_spare() -> None:
    device = ScheduledDevice(num_blocks=32, max_model_len=512, depth=0, prefix_caching=False)
    first = device.add(20, max_tokens=120)
    device.step()
    second = device.add(360, max_tokens=20)
    device.step()
    assert (len(first.block_ids), len(second.block_ids)) == (9, 23), "none is left"
    device.drain()
    assert [r.num_preemptions for r in (first, second)] == [0, 0]
    assert [r.output_token_ids for r in (first, second)] == [oracle(r) for r in (first, second)]


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
def test_blocks_that_no_round_may_reach_are_taken_back(num_steps: int) -> None:
    """Rows with rounds in flight and a prompt that is computed in parts keep the blocks that they need."""
    device = ScheduledDevice(
        num_blocks=64, depth=3, prefill_chunk=32, accept=lambda num_valid: min(1, num_valid)
    )
    rows = [device.add(20, max_tokens=150), device.add(100, max_tokens=100)]
    for _ in range(num_steps):
        device.launch()
    reached = [
        min(
            r.limit,
            (r.num_tokens if r.status is Status.PREFILLING else r.num_computed + 4 * r.num_rounds_in_flight)
            + 4,
        )
        for r in rows
    ]
    assert device.scheduler.supply.take_back_spares()
    assert [len(r.block_ids) for r in rows] == [-(-n // 16) for n in reached]
    assert not device.scheduler.supply.take_back_spares()
    while device._in_flight:
        device.read()
    device.drain()
    assert [r.output_token_ids for r in rows] == [oracle(r) for r in rows]


def test_the_head_of_the_queue_is_not_overtaken_by_what_would_fit() -> None:
    device = ScheduledDevice(num_blocks=16, prefix_caching=False, depth=0, prefill_chunk=4096)
    device.add(150, max_tokens=20)
    large, small = device.add(150), device.add(4)
    device.step()
    assert [large.status, small.status] == [Status.WAITING, Status.WAITING]
    device.scheduler.abort(large.request_id)
    device.step_until_prompts()
    assert small.status is Status.RUNNING


def test_a_request_waits_for_a_row() -> None:
    device = ScheduledDevice(max_running=2)
    requests = [device.add(4) for _ in range(3)]
    device.step()
    assert [r.status for r in requests] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    device.drain()
    assert [r.output_token_ids for r in requests] == [oracle(r) for r in requests]


# --- rows ------------------------------------------------------------------------------------------------


def test_a_freed_row_in_the_middle_goes_to_the_next_request() -> None:
    device = ScheduledDevice(depth=0)
    requests = [device.add(4, max_tokens=50) for _ in range(3)]
    device.step()
    device.scheduler.abort(requests[1].request_id)
    device.add(4)
    plan, _ = device.step()
    assert (plan.released_rows, plan.moves, [s.row for s in plan.setups]) == ((1,), (), [1])


def test_the_highest_rows_move_into_holes_that_no_new_request_takes() -> None:
    device = ScheduledDevice(depth=0)
    requests = [device.add(4, max_tokens=50) for _ in range(6)]
    device.step()
    for number in (0, 2, 3):
        device.scheduler.abort(requests[number].request_id)
    device.add(4)
    plan, _ = device.step()
    assert plan.released_rows == (0, 2, 3)
    assert plan.moves == (RowMove(source=5, target=2), RowMove(source=4, target=3))
    assert [s.row for s in plan.setups] == [0]
    assert plan.decode_request_ids == (None, 1, 5, 4)
    device.step_until_prompts()
    assert device.step()[0].decode_request_ids == (6, 1, 5, 4)


def test_the_result_of_a_step_in_flight_goes_by_the_rows_of_its_own_plan() -> None:
    device = ScheduledDevice(depth=1)
    requests = [device.add(4 + i, max_tokens=50) for i in range(3)]
    device.step()
    device.launch()
    device.scheduler.abort(requests[0].request_id)
    plan = device.launch()
    assert plan is not None
    assert plan.moves == (RowMove(source=2, target=0),)
    device.drain()
    assert [r.output_token_ids for r in requests[1:]] == [oracle(r) for r in requests[1:]]


# --- preemption ------------------------------------------------------------------------------------------


def preemptible(**options: int | bool) -> ScheduledDevice:
    """Eight blocks: two requests of 40 tokens are admitted with three each, and grow beyond four."""
    return ScheduledDevice(num_blocks=8, max_model_len=128, depth=1, **options)


def test_the_newest_is_preempted_and_goes_to_the_front_of_the_queue() -> None:
    device = preemptible()
    old, new = device.add(40, max_tokens=60), device.add(40, max_tokens=60)
    device.step()
    later = device.add(60)
    while not new.num_preemptions:
        device.step()
    assert [r.status for r in (old, new, later)] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    assert list(device.scheduler.state.waiting) == [new, later]
    assert (new.block_ids, new.row, new.num_computed) == ([], None, 0)
    device.drain()
    assert [r.output_token_ids for r in (old, new, later)] == [oracle(r) for r in (old, new, later)]
    assert (old.num_preemptions, later.num_preemptions) == (0, 0)


@pytest.mark.parametrize("num_unread", [0, 1])
@pytest.mark.parametrize("forgets_blocks", [False, True])
def test_a_request_can_be_preempted_between_steps(forgets_blocks: bool, num_unread: int) -> None:
    device = ScheduledDevice(num_blocks=64, depth=2)
    requests = [device.add(40, max_tokens=60) for _ in range(3)]
    device.step_until_round()
    for _ in range(num_unread):
        device.launch()
    assert device.scheduler.preempt(1, forgets_blocks=forgets_blocks)
    assert not device.scheduler.preempt(1), "it waits"
    assert not device.scheduler.preempt(7), "there is no such request"
    while device.has_unread:
        device.read()
    plan, _ = device.step_until_prompts()
    assert [chunk.start for chunk in plan.prefill] == [0 if forgets_blocks else 32]
    device.drain()
    assert [r.num_preemptions for r in requests] == [0, 1, 0]
    assert [r.output_token_ids for r in requests] == [oracle(r) for r in requests]


def test_the_newest_gives_way_itself_when_it_is_the_one_in_need() -> None:
    device = preemptible()
    old, new = device.add(65, max_tokens=5), device.add(46, max_tokens=60)  # five blocks for ever, and three
    device.step_until_round()
    plan, _ = device.step()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert plan.released_rows == (1,)
    device.drain()
    assert new.output_token_ids == oracle(new)


def test_a_request_is_not_taken_back_while_a_round_of_it_is_unread() -> None:
    device = preemptible()
    old, new = device.add(65, max_tokens=5), device.add(45, max_tokens=60)
    device.step()
    device.launch()
    plan = device.launch()
    assert plan is not None
    assert new.num_preemptions == 1
    device.scheduler.abort(old.request_id)
    assert device.launch() is None, "its blocks are free, its tokens unknown"
    device.read()
    assert new.output_token_ids == oracle(new)[: len(new.output_token_ids)] != []
    plan = device.launch()
    assert plan is not None
    assert plan.prefill[0].start + len(plan.prefill[0].token_ids) == new.num_tokens
    device.drain()
    assert new.output_token_ids == oracle(new)


def test_tokens_that_arrive_for_a_preempted_request_may_end_it() -> None:
    device = preemptible()
    device.add(65, max_tokens=5)
    new = device.add(46, max_tokens=3)
    device.step()
    device.launch()
    device.scheduler.state.preempt(new)
    events = device.read()
    assert (events[1].request_id, events[1].finish_reason) == (new.request_id, FinishReason.LENGTH)
    device.drain()
    assert new.output_token_ids == oracle(new)
    assert device.scheduler.snapshot().num_kv_blocks_used == 0


def test_blocks_that_a_preempted_request_published_are_found_again() -> None:
    device = preemptible()
    device.add(40, max_tokens=60)
    new = device.add(40, max_tokens=60)
    device.step()
    device.scheduler.state.preempt(new)
    plan, _ = device.step_until_prompts()
    assert [(c.request_id, c.start) for c in plan.prefill] == [(1, 32)]
    assert new.num_cached == 32


# --- abort -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_launched", "num_read", "status"),
    [
        (0, 0, Status.WAITING),
        (1, 0, Status.PREFILLING),
        (1, 1, Status.PREFILLING),
        (2, 1, Status.PREFILLING),
        (3, 2, Status.RUNNING),
        (4, 3, Status.RUNNING),
        (4, 4, Status.RUNNING),
    ],
    ids=str,
)
def test_abort_frees_everything_at_any_state(num_launched: int, num_read: int, status: Status) -> None:
    device = ScheduledDevice(prefill_chunk=16)
    request = device.add(40, max_tokens=100)
    for _ in range(num_launched):
        device.launch()
        if num_read:
            device.read()
            num_read -= 1
    assert request.status is status
    device.scheduler.abort(request.request_id)
    stats = device.scheduler.snapshot()
    assert (stats.num_kv_blocks_used, stats.num_requests_running, stats.num_requests_waiting) == (0, 0, 0)
    assert (request.finish_reason, device.scheduler.has_work) == (FinishReason.ABORT, False)
    device.drain()
    other = device.add(50, max_tokens=20)
    device.drain()
    assert other.output_token_ids == oracle(other)


def test_aborting_an_unknown_or_ended_request_changes_nothing() -> None:
    device = ScheduledDevice()
    request = device.add(4, max_tokens=1)
    device.drain()
    device.scheduler.abort(request.request_id)
    device.scheduler.abort(99)
    assert device.scheduler.snapshot().finished_by_reason == {"length": 1}


# --- priority ---------------------------------------------------------------------------------------------


def running_ids(device: ScheduledDevice) -> list[int]:
    return [request.request_id for request in device.scheduler.state.running]


def test_priority_comes_before_arrival() -> None:
    device = ScheduledDevice(max_running=1)
    requests = [device.add(4, max_tokens=1, priority=p) for p in (0, 1, -1, 0, -1)]
    served = [chunk.request_id for plan in device.drain() for chunk in plan.prefill]
    assert served == [2, 4, 0, 3, 1]
    assert all(request.output_token_ids == oracle(request) for request in requests)


def test_one_that_waits_does_not_stop_one_that_runs() -> None:
    device = ScheduledDevice(max_running=1)
    device.add(4, max_tokens=40, priority=5)
    device.step()
    device.add(4, priority=-5)
    device.step()
    assert running_ids(device) == [0]


def test_the_prompt_of_a_lower_priority_is_not_waited_for() -> None:
    device = ScheduledDevice(prefill_chunk=16)
    slow = device.add(200, max_tokens=1, priority=5)
    device.step()
    urgent, equal = device.add(4, max_tokens=1, priority=-5), device.add(4, max_tokens=1, priority=5)
    chunks = {chunk.request_id: len(chunk.token_ids) for chunk in device.step()[0].prefill}
    assert chunks == {urgent.request_id: 4, slow.request_id: 12}
    device.drain()
    assert all(request.output_token_ids == oracle(request) for request in (slow, urgent, equal))


def test_the_lowest_in_priority_gives_way_whenever_it_came() -> None:
    """Both grow to 4 of 6 blocks; the first to come is the last in precedence."""
    device = ScheduledDevice(num_blocks=6, max_model_len=64, depth=0, prefix_caching=False)
    first = device.add(16, max_tokens=40, priority=1)
    urgent = device.add(16, max_tokens=40, priority=0)
    device.drain()
    assert (first.num_preemptions > 0, urgent.num_preemptions) == (True, 0)
    assert all(request.output_token_ids == oracle(request) for request in (first, urgent))


def test_a_preempted_request_waits_behind_those_before_it() -> None:
    device = ScheduledDevice(num_blocks=6, max_model_len=64, depth=0, prefix_caching=False, max_running=2)
    device.add(16, max_tokens=40, priority=1)
    device.add(16, max_tokens=40, priority=0)
    device.step()
    waiting = device.add(60, max_tokens=1, priority=0)
    while device.scheduler.num_running == 2:
        device.step()
    assert [request.request_id for request in device.scheduler.state.waiting] == [waiting.request_id, 0]
    device.drain()


# --- mixed batches ---------------------------------------------------------------------------------------


def mixed_plan(
    *,
    num_rows: int = 4,
    prompt: int = 20,
    depth: int = 3,
    caps: tuple[int | None, ...] = (None,),
    above: int | None = 12,
    **sampling: object,
) -> Plan:
    """Returns the plan of the step that computes a prompt while rows decode; the last of these has the
    options `sampling`."""
    options: dict[str, int] = {} if above is None else {"mixed_above_tokens": above}
    device = ScheduledDevice(max_model_len=1024, num_blocks=256, depth=depth, prefill_chunk=1024, **options)
    for place in range(num_rows):
        wishes = sampling if place == num_rows - 1 else {}
        device.add(5, max_tokens=100, max_draft_tokens=caps[place % len(caps)], **wishes)
    device.step()
    device.step()
    device.add(prompt, max_tokens=9)
    plan = device.launch()
    assert plan is not None
    return plan


def test_few_prompt_tokens_share_the_pass_of_a_large_round() -> None:
    plan = mixed_plan()
    assert plan.is_mixed
    assert plan.decode_request_ids == (0, 1, 2, 3)
    assert len(mixed_plan(prompt=128).prefill[0].token_ids) == 128
    assert mixed_plan(caps=(0, 1, 1, None)).is_mixed
    assert mixed_plan(num_rows=5, caps=(0, 2)).is_mixed, "15 tokens, no row drafts at full depth"


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(4, 128), (16, 128), (17, 256), (32, 256), (33, 384), (60, 384)]
)
def test_prompt_tokens_of_a_mixed_pass_grow_with_the_round(num_rows: int, expected: int) -> None:
    """Two for each of the round's four tokens a row, in steps of 128, at most 384: the pass takes less than
    twice as long as the round."""
    plan = mixed_plan(num_rows=num_rows, prompt=600)
    assert plan.is_mixed
    assert sum(len(chunk.token_ids) for chunk in plan.prefill) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": 3}, {"above": None}, {"caps": (2,)}, {"frequency_penalty": 0.5}, {"num_logprobs": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_other_prompts_get_a_pass_of_their_own(changes: dict[str, object]) -> None:
    plan = mixed_plan(**changes)  # type: ignore[arg-type]
    assert not plan.is_mixed
    assert plan.decode_request_ids == ()


def test_prompts_share_the_pass_of_a_round_of_any_depth() -> None:
    """An operator may limit the drafts of rounds."""
    device = ScheduledDevice(depth=3, prefill=PrefillPolicy(64, 96, 32, mixed_above_tokens=2))
    let_rows_decode(device, 3)
    for depth in (3, 1, 0, 2):
        device.scheduler.set_depth(depth)
        device.add(20, max_tokens=1)
        plan, _ = device.step_until_prompts()
        assert (plan.is_mixed, plan.depth) == (True, depth)


def test_no_more_prompts_are_admitted_than_share_the_pass_of_a_large_round() -> None:
    device = ScheduledDevice(depth=3, prefill=PrefillPolicy(64, 96, 32, mixed_above_tokens=4))
    let_rows_decode(device, 2)
    for _ in range(2):
        device.add(40, max_tokens=9)
    lengths = [[len(chunk.token_ids) for chunk in device.step()[0].prefill] for _ in range(3)]
    assert lengths == [[32], [8, 24], [16]]


def test_a_chunk_with_very_many_cached_keys_shares_no_round() -> None:
    prefill = PrefillPolicy(16, 16, 16, mixed_above_tokens=0, max_mixed_keys=19)
    device = ScheduledDevice(prefill=prefill)
    device.add(5, max_tokens=100)
    device.step()
    device.add(40, max_tokens=9)
    plans = [device.launch() for _ in range(3)]
    starts = [(plan.prefill[0].start, plan.is_mixed) for plan in plans if plan is not None]
    assert starts == [(0, True), (16, True), (32, False)]
