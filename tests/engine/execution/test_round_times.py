"""The rounds that are measured before the first request: which, and that they leave no trace."""

from __future__ import annotations

import time
from pathlib import Path

from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine

from headway.engine.build import measured_policy
from headway.engine.execution.round_times import measured_rounds
from headway.engine.protocol.config import EngineConfig
from headway.engine.scheduling.depth.costs import RoundLoad


def test_the_shortest_run_of_each_size_counts() -> None:
    times = iter([3.0, 2.0, 5.0, 6.0, 4.0, 4.5, 9.0, 8.0])
    found = measured_rounds(lambda rows, depth: next(times), [1, 2], [0, 1], limit_seconds=None)
    assert found == {(1, 0): 2.0, (1, 1): 5.0, (2, 0): 4.0, (2, 1): 8.0}


def test_a_slow_device_measures_two_numbers_of_rows() -> None:
    def run(rows: int, depth: int) -> float:
        time.sleep(0.01)
        return 0.01

    found = measured_rounds(run, [1, 2, 4, 8], [0, 3], limit_seconds=0.0)
    assert set(found) == {(1, 0), (1, 3), (8, 0), (8, 3)}, "two that tell of those between"


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    path = constructed_mimo(tmp_path / "model")
    fresh, measured = (LocalEngine(EngineConfig(model_path=str(path), max_running=4)) for _ in range(2))
    policy = measured_policy(measured.engine)
    measured.engine.scheduler.set_depth_policy(policy)
    for tensor in measured.engine.runner.pool.by_block():
        assert not bool(tensor.any())
    prompt = list(range(1, 40))
    assert measured.generate(prompt, max_tokens=20) == fresh.generate(prompt, max_tokens=20)
    assert all(0 < seconds < 1 for seconds in policy._costs.seconds(RoundLoad(1, 0)))
