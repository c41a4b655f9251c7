"""copy_results_to_host: rounds leave their results in turns, whole, with their number and the time; no place
but theirs is touched."""

import pytest
import torch

from headway.kernels import copy_results_to_host, stamp

NUM_PLACES, WIDTH = 3, 2100
SIZES = {"one": 1, "a row": 9, "a block": 2048, "beyond a block": 2049, "all": WIDTH}


def memory(device: torch.device) -> torch.Tensor:
    """[NUM_PLACES, WIDTH + 1], where the host reads it."""
    return torch.full((NUM_PLACES, WIDTH + 1), -7, pin_memory=device.type == "cuda")


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
def test_each_call_writes_the_next_place(device: torch.device, size: int) -> None:
    places, count = memory(device), torch.zeros(1, dtype=torch.int64, device=device)
    packed = [torch.randint(-(2**62), 2**62, (size,), device=device) for _ in range(NUM_PLACES + 1)]
    for number, values in enumerate(packed):
        before = places.clone()
        copy_results_to_host(values, places, count, time_index=size - 1)
        if device.type == "cuda":
            torch.cuda.synchronize()
        before[number % NUM_PLACES, : size + 1] = torch.tensor([number, *values.tolist()])
        assert torch.equal(places, before)
        assert count.item() == number + 1


def test_the_time_is_that_of_a_stamp(device: torch.device, is_interpreted: bool) -> None:
    """Each thread has a clock of its own: many times, that it shows."""
    places, count = memory(device), torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(100 if device.type == "cuda" else 2):
        packed, around = (torch.zeros(n, dtype=torch.int64, device=device) for n in (5, 2))
        stamp(around[:1])
        copy_results_to_host(packed, places, count, time_index=2)
        stamp(around[1:])
        before, after = around.tolist()
        time = int(packed[2])
        assert places[number % NUM_PLACES, :6].tolist() == [number, 0, 0, time, 0, 0]
        assert before <= time <= after or (is_interpreted and time == 0)


@pytest.mark.parametrize(("size", "time_index"), [(WIDTH + 1, 0), (4, 4), (4, -1)])
def test_what_does_not_fit_is_refused(device: torch.device, size: int, time_index: int) -> None:
    packed, count = (torch.zeros(n, dtype=torch.int64, device=device) for n in (size, 1))
    with pytest.raises(AssertionError):
        copy_results_to_host(packed, memory(device), count, time_index=time_index)


@pytest.mark.gpu
def test_all_warps_write_to_one_place() -> None:
    """Launched one over the other: the next one's number is there soon after this one's has been read."""
    device = torch.device("cuda")
    places, count = memory(device), torch.zeros(1, dtype=torch.int64, device=device)
    packed = torch.zeros(WIDTH, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    copy_results_to_host(packed, places, count, time_index=0)
    with torch.cuda.graph(graph):
        for _ in range(NUM_PLACES):
            packed[1:] += 1
            copy_results_to_host(packed, places, count, time_index=0)
    for turn in range(500):
        graph.replay()
        torch.cuda.synchronize()
        for step in range(NUM_PLACES):
            number = 1 + turn * NUM_PLACES + step
            place = places[number % NUM_PLACES]
            assert place[0] == number
            assert bool((place[2:] == number).all())
