"""Rounds and the runner go through the host's places in step; who reads them gets what the rounds left."""

from pathlib import Path

import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine

from headway.engine.config import EngineConfig
from headway.engine.host_ring import HostRing
from headway.engine.round import NUM_STAMPS

DEPTH = 3


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ring(request: pytest.FixtureRequest) -> HostRing:
    return HostRing(8, torch.device(request.param))


def publish(ring: HostRing, first: int) -> list[int]:
    """A result of eight numbers, whose first is the time. Returns the others."""
    device = ring._count.device
    ring.publish(torch.arange(first, first + 8, device=device), time_index=0)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return list(range(first + 1, first + 8))


def test_a_result_stays_while_two_more_come(ring: HostRing) -> None:
    for turn in range(5):
        expected = [publish(ring, 100 * turn + 10 * i) for i in range(3)]
        taken = [ring.take(8) for _ in expected]
        assert [place[1:].tolist() for place in taken] == expected


def test_results_may_be_taken_before_they_are_there(ring: HostRing) -> None:
    for first in (0, 50):
        place = ring.take(5)
        expected = publish(ring, first)
        assert place[1:].tolist() == expected[:4]


def test_what_nobody_took_is_forgotten(ring: HostRing) -> None:
    for first in (10, 20, 30, 40):
        publish(ring, first)
    ring.restart()
    expected = publish(ring, 50)
    assert ring.take(8)[1:].tolist() == expected


@pytest.mark.parametrize("reads_late", [False, True], ids=["read at once", "read late"])
def test_an_engine_reads_all_its_rounds_there(tmp_path: Path, reads_late: bool) -> None:
    """As on a GPU, but on a CPU: rows that come and go, rounds of any number of them."""
    config = EngineConfig(model_path=str(constructed_mimo(tmp_path, noise=0.08)), depth=DEPTH, max_running=4)
    engines = [LocalEngine(config, reads_late=reads_late) for _ in range(2)]
    runner = engines[1].engine.runner
    runner._ring = HostRing(NUM_STAMPS + config.num_rows * (DEPTH + 2), runner.device)
    for engine in engines:
        for i in range(9):
            engine.submit(range(1, 20 + i), max_tokens=7 + 5 * i)
            engine.step()
    texts = [[output.token_ids for output in engine.run().values()] for engine in engines]
    assert texts[0] == texts[1]
    assert runner._ring._num_taken == int(runner._ring._count) > 20
