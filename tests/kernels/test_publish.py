"""publish: rounds leave their results in turns, whole, with the time; no place but theirs is touched."""

import pytest
import torch

from headway.kernels import publish, stamp

NUM_PLACES, WIDTH = 3, 1300
SIZES = {"one": 1, "a row": 9, "a block": 512, "beyond a block": 513, "all": WIDTH}


def memory(device: torch.device) -> torch.Tensor:
    """[NUM_PLACES, WIDTH], where the host reads it."""
    return torch.full((NUM_PLACES, WIDTH), -7, pin_memory=device.type == "cuda")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_each_call_writes_the_next_place(device: torch.device, size: int) -> None:
    places, count = memory(device), torch.zeros(1, dtype=torch.int64, device=device)
    packed = [torch.randint(-(2**62), 2**62, (size,), device=device) for _ in range(NUM_PLACES + 1)]
    for turn, values in enumerate(packed):
        before = places.clone()
        publish(values, places, count, time_index=size - 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        own = turn % NUM_PLACES
        assert places[own, : size - 1].tolist() == values[: size - 1].tolist()
        before[own, :size] = places[own, :size]
        assert torch.equal(places, before)
        assert count.item() == turn + 1


def test_the_time_is_that_of_a_stamp(device: torch.device) -> None:
    """The interpreter has no clock: what stood there stays."""
    places, count = memory(device), torch.zeros(1, dtype=torch.int64, device=device)
    packed, around = (
        torch.zeros(5, dtype=torch.int64, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    stamp(around[:1])
    publish(packed, places, count, time_index=2)
    stamp(around[1:])
    if device.type == "cuda":
        torch.cuda.synchronize()
    before, after = around.tolist()
    written = places[0, :5].tolist()
    assert written == [0, 0, written[2], 0, 0]
    assert before <= written[2] <= after or (written[2] == 0 and device.type == "cpu")


@pytest.mark.parametrize(("size", "time_index"), [(WIDTH + 1, 0), (4, 4), (4, -1)])
def test_what_does_not_fit_is_refused(device: torch.device, size: int, time_index: int) -> None:
    packed, count = (torch.zeros(n, dtype=torch.int64, device=device) for n in (size, 1))
    with pytest.raises(AssertionError):
        publish(packed, memory(device), count, time_index=time_index)
