"""The rounds that are measured before the first request: which, and that they leave no trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine

from headway.engine.build import measured_policy
from headway.engine.execution import round_times
from headway.engine.execution.round_times import measured_rounds
from headway.engine.protocol.config import EngineConfig
from headway.engine.scheduling.depth.costs import RoundLoad


def test_the_shortest_run_of_each_size_counts() -> None:
    times = iter([3.0, 2.0, 5.0, 6.0, 4.0, 4.5, 9.0, 8.0])
    found = measured_rounds(lambda rows, depth: next(times), [1, 2], [0, 1], limit_seconds=None)
    assert found == {(1, 0): 2.0, (1, 1): 5.0, (2, 0): 4.0, (2, 1): 8.0}


@pytest.mark.parametrize(("seconds", "second"), [(0.1, 2), (0.05, 8)])
def test_a_device_that_is_not_slow_measures_numbers_of_rows_that_lie_apart(
    seconds: float, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of rows takes four runs. The time is over after the first one, or after the second."""
    now = 0.0

    def run(rows: int, depth: int) -> float:
        nonlocal now
        now += seconds
        return seconds

    monkeypatch.setattr(round_times, "time", SimpleNamespace(monotonic=lambda: now))
    found = measured_rounds(run, [1, 2, 4, 8, 16], [0, 3], limit_seconds=0.3)
    assert set(found) == {(1, 0), (1, 3), (second, 0), (second, 3)}


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
