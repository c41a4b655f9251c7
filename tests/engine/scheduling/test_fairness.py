"""Requests of many choices beside others: turns, rows and the queue. The device is simulated."""

from __future__ import annotations

import pytest
from headway_testing.scheduling import ScheduledDevice, oracle

from headway.engine.protocol.errors import QueueFullError
from headway.engine.scheduling.request import Request

HOG = 96


def add_hog(device: ScheduledDevice, group_id: int, count: int = HOG, max_tokens: int = 40) -> list[Request]:
    return [device.add([7 + i % 5], max_tokens=max_tokens, group_id=group_id) for i in range(count)]


def num_steps_until_first_token(device: ScheduledDevice, request: Request, limit: int = 20) -> int:
    for count in range(limit):
        if request.output_token_ids:
            return count
        device.step()
    raise AssertionError(f"no token after {limit} steps")


@pytest.mark.parametrize("num_blocks", [2000, 70], ids=["rows-are-scarce", "blocks-are-scarce"])
def test_a_small_request_does_not_wait_for_large_ones(num_blocks: int) -> None:
    device = ScheduledDevice(max_running=16, num_blocks=num_blocks)
    hogs = add_hog(device, -1) + add_hog(device, -2)
    for _ in range(12):
        device.step()
    small = [device.add(9 + i, max_tokens=8) for i in range(4)]
    assert max(num_steps_until_first_token(device, request) for request in small) <= 4
    device.drain()
    assert all(request.output_token_ids == oracle(request) for request in [*hogs, *small])


def test_large_requests_take_turns() -> None:
    device = ScheduledDevice(max_running=16, num_blocks=2000)
    first, second = add_hog(device, -1, 64, 10), add_hog(device, -2, 64, 10)
    while not any(request.output_token_ids for request in second):
        device.step()
    assert sum(bool(request.output_token_ids) for request in first) <= 32
    device.drain()
    assert all(request.output_token_ids == oracle(request) for request in first + second)


def test_who_is_alone_never_gives_its_row_to_one_that_waits() -> None:
    device = ScheduledDevice(max_running=4, num_blocks=2000)
    alone = [device.add(4, max_tokens=50) for _ in range(4)]
    device.step()
    device.add(4, max_tokens=8)
    for _ in range(8):
        device.step()
    assert [request.num_preemptions for request in alone] == [0] * 4
    device.drain()


def test_a_more_urgent_group_keeps_its_rows() -> None:
    device = ScheduledDevice(max_running=4, num_blocks=2000)
    urgent = [device.add(4, max_tokens=50, priority=-1, group_id=-1) for _ in range(8)]
    device.step()
    device.add(4, max_tokens=8)
    for _ in range(8):
        device.step()
    assert sum(request.num_preemptions for request in urgent) == 0
    device.drain()


def test_large_requests_leave_room_in_the_queue_for_others() -> None:
    device = ScheduledDevice(max_running=4, max_waiting=1024, num_blocks=2000)
    for group_id in (-1, -2, -3):
        add_hog(device, group_id, 512)
    device.add(4)
    assert device.scheduler.num_waiting == 3 * 512 + 1


def test_choices_beyond_all_bounds_are_refused_to_who_has_most_of_them() -> None:
    device = ScheduledDevice(max_running=1, max_waiting=4, num_blocks=2000)
    add_hog(device, -1, 32)
    with pytest.raises(
        QueueFullError,
        match=r"32 choices wait, 32 of them of this request, the limit is 32 \(8 x max_waiting\)",
    ):
        device.add(4, group_id=-1)
    device.add(4, group_id=-2)
    device.add(4)
    device.add(4)
    with pytest.raises(QueueFullError, match=r"4 requests wait, the limit is 4 \(max_waiting\)"):
        device.add(4)


def test_the_rows_beyond_the_first_of_each_group_are_bounded() -> None:
    device = ScheduledDevice(max_running=16, max_extra_rows=3, num_blocks=2000)
    add_hog(device, -1, 20)
    add_hog(device, -2, 20)
    device.step()
    assert device.scheduler.num_running == 5
    device.add(4)
    device.step()
    assert device.scheduler.num_running == 6
    device.drain()


def test_a_first_token_does_not_wait_for_the_round_of_others() -> None:
    device = ScheduledDevice(max_running=16, num_blocks=2000)
    running = [device.add(4, max_tokens=60) for _ in range(5)]
    device.step_until_round()
    device.add(4)
    plan, events = device.step()
    assert (len(plan.prefill), plan.decode_request_ids) == (1, ())
    assert [(event.request_id, len(event.token_ids)) for event in events] == [(5, 1)]
    device.add(4)
    plan, _ = device.step()
    assert (plan.prefill, len(plan.decode_request_ids)) == ((), 6), "they take turns"
    device.drain()
    assert all(request.output_token_ids == oracle(request) for request in running)
