"""Rounds and the runner go through the host's places in step; who reads them gets what the rounds left, or a
fault."""

import time
from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine

from headway.engine.execution.host_ring import HostRing, RingSlot
from headway.engine.execution.results import DeviceResults, StepHandle
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.stats import StageSeconds

DEPTH = 3


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ring(request: pytest.FixtureRequest) -> HostRing:
    return HostRing(8, torch.device(request.param))


def deliver(ring: HostRing, first: int) -> list[int]:
    """A result of eight numbers, whose first is the time. Returns the others."""
    device = ring._count.device
    ring.deliver(torch.arange(first, first + 8, device=device), time_index=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return list(range(first + 1, first + 8))


def test_a_result_stays_while_two_more_come(ring: HostRing) -> None:
    for turn in range(5):
        taken = [ring.take(8) for _ in range(3)]
        expected = [deliver(ring, 100 * turn + 10 * i) for i in range(3)]
        assert [place.read()[1:] for place in taken] == expected


def test_fewer_numbers_may_be_wanted_than_are_left(ring: HostRing) -> None:
    for first in (0, 50):
        place = ring.take(5)
        expected = deliver(ring, first)
        assert place.read()[1:] == expected[:4]


def test_what_nobody_took_is_forgotten(ring: HostRing) -> None:
    ring.take(8)
    for first in (10, 20, 30, 40, 50):
        deliver(ring, first)
    ring.restart()
    place = ring.take(8)
    expected = deliver(ring, 60)
    assert place.read()[1:] == expected


@pytest.mark.parametrize("num_delivered", [1, 5], ids=["too early", "too late"])
def test_a_place_read_out_of_its_time_is_a_fault(ring: HostRing, num_delivered: int) -> None:
    """Before its round, the second one, is done; behind the third one after it."""
    place = [ring.take(8), ring.take(8)][1]
    for first in range(num_delivered):
        deliver(ring, first)
    with pytest.raises(AssertionError, match="round 1 was to be here"):
        place.read()


@pytest.mark.parametrize("num_rounds", range(1, 7))
def test_rounds_that_nobody_took_are_noticed(ring: HostRing, num_rounds: int) -> None:
    for first in range(num_rounds):
        deliver(ring, first)
    place = ring.take(8)
    deliver(ring, 90)
    with pytest.raises(AssertionError, match="round 0 was to be here"):
        place.read()


def test_a_runner_out_of_step_ends_its_engine_rather_than_change_a_text(tmp_path: Path) -> None:
    engine = LocalEngine(EngineConfig(model_path=str(constructed_mimo(tmp_path)), depth=DEPTH))
    assert len(engine.generate(range(1, 20), max_tokens=9)) == 9
    runner = engine.engine.runner
    runner._ring.deliver(torch.zeros(5, dtype=torch.int64), time_index=0)
    with pytest.raises(AssertionError, match="was to be here"):
        engine.generate(range(1, 20), max_tokens=9)


def test_each_stage_takes_what_lies_between_two_times() -> None:
    times = [5_000_000_000, 6_000_000_000, 8_000_000_000, 12_000_000_000, 15_000_000_000]
    lines = [2, 40, 41, 1, 50, 51]
    place = RingSlot(7, len(times + lines), torch.tensor([7, *times, *lines, -1]))
    results = DeviceResults(torch.device("cpu"), depth=1, round=place)
    result = StepHandle(results).result()
    assert result.seconds == StageSeconds(draft=1.0, target=2.0, mask=4.0, bookkeeping=3.0, prefill=0.0)
    assert result.emitted == ((40, 41), (50,))
    results.prefill_stamps = torch.tensor([1_000_000_000, 5_000_000_000])
    assert StepHandle(results).result().seconds.prefill == 4.0


def test_a_step_without_a_round_takes_no_time() -> None:
    result = StepHandle(DeviceResults(torch.device("cpu"), depth=3)).result()
    assert result.seconds == StageSeconds(draft=0.0, target=0.0, bookkeeping=0.0, prefill=0.0)
    assert result.emitted == ()


def test_the_times_of_a_round_are_in_their_order(tmp_path: Path) -> None:
    engine = LocalEngine(EngineConfig(model_path=str(constructed_mimo(tmp_path)), depth=DEPTH))
    started = time.perf_counter()
    engine.generate(range(1, 20), max_tokens=30)
    stages = engine.engine.scheduler.snapshot().stage_seconds
    assert stages.pop("mask") == 0, "nothing waits without a grammar"
    assert all(seconds > 0 for seconds in stages.values())
    assert sum(stages.values()) <= time.perf_counter() - started
