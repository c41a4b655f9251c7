"""Acceptance at set rates: those asked for, drawn by seed and position, whoever else is in the batch."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from headway_testing.checkpoints import random_mimo
from headway_testing.local import GREEDY, LocalEngine
from headway_testing.padded import PaddedLaunches

from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.protocol.config import EngineConfig
from headway.engine.speculation.synthetic import SyntheticAcceptance
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import RoundWindow

VOCABULARY = 50
NUM_ROWS = 20_000
RATES = (0.9, 0.8, 0.7)


def table(seeds: torch.Tensor) -> RowTensors:
    rows = RowTensors.allocate(
        len(seeds),
        max_blocks=1,
        max_pending=1,
        device=torch.device("cpu"),
    )
    rows.seeds.copy_(seeds)
    return rows


def opened(starts: torch.Tensor, depth: int) -> tuple[torch.Tensor, RoundWindow]:
    """Picks and a window of ids so few that they often agree of themselves; all of them valid."""
    generator = torch.Generator().manual_seed(0)
    shape = (len(starts), depth + 1)
    sampled, tokens = (
        torch.randint(VOCABULARY - 3, VOCABULARY, shape, generator=generator) for _ in range(2)
    )
    window = RoundWindow.empty(len(starts), depth, torch.device("cpu"))
    window.token_ids.copy_(tokens)
    window.is_valid.fill_(True)
    window.start_positions.copy_(starts)
    return sampled, window


def rows_of(window: RoundWindow, row: int) -> RoundWindow:
    """That row alone."""
    return RoundWindow(*(getattr(window, name)[row : row + 1] for name in RoundWindow.__slots__))


def forced(rates: tuple[float, ...], seeds: torch.Tensor, starts: torch.Tensor, depth: int) -> torch.Tensor:
    """[rows] int64: drafts that verification accepts."""
    synthetic = SyntheticAcceptance.of_rates(rates, VOCABULARY, torch.device("cpu"))
    sampled, window = opened(starts, depth)
    result = sampled.clone()
    synthetic.force(result, window, table(seeds))
    assert ((result >= 0) & (result < VOCABULARY)).all()
    assert torch.equal(result[:, -1], sampled[:, -1])
    return (result[:, :-1] == window.token_ids[:, 1:]).cumprod(dim=1).sum(dim=1)


@pytest.mark.parametrize("varies", ["seed", "position"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_position_is_accepted_as_often_as_was_asked_for(depth: int, varies: str) -> None:
    numbers, ones = torch.arange(NUM_ROWS), torch.ones(NUM_ROWS, dtype=torch.int64)
    seeds, starts = (numbers, 7 * ones) if varies == "seed" else (7 * ones, 10 * numbers)
    counts = forced(RATES, seeds, starts, depth)
    for place, rate in enumerate(RATES[:depth], start=1):
        spread = 4 * math.sqrt(rate * (1 - rate) / NUM_ROWS)
        assert abs((counts >= place).double().mean().item() - rate) < spread


@pytest.mark.parametrize(
    ("rates", "expected"), [((0.0, 0.0), 0), ((1.0, 0.0), 1), ((1.0, 1.0), 2)], ids=["none", "first", "all"]
)
def test_rates_of_zero_and_one_are_certain(rates: tuple[float, ...], expected: int) -> None:
    numbers = torch.arange(1000)
    assert (forced(rates, numbers, numbers, 2) == expected).all()


def test_a_row_is_the_same_alone_and_in_a_crowd() -> None:
    synthetic = SyntheticAcceptance.of_rates(RATES, VOCABULARY, torch.device("cpu"))
    seeds, starts = torch.arange(-50, 50) * 123_456_789_123, torch.arange(100)
    sampled, window = opened(starts, 3)
    together = sampled.clone()
    synthetic.force(together, window, table(seeds))
    for row in (0, 41, 99):
        only = slice(row, row + 1)
        alone = sampled[only].clone()
        synthetic.force(alone, rows_of(window, row), table(seeds[only]))
        assert torch.equal(alone, together[only])


def test_what_no_valid_draft_follows_is_left_alone() -> None:
    """Rows that are padding or at their cap: a prompt's first token may be sampled in the one, text goes on
    in the other."""
    synthetic = SyntheticAcceptance.of_rates((1.0, 1.0, 1.0), VOCABULARY, torch.device("cpu"))
    numbers = torch.arange(100)
    sampled, window = opened(numbers, 3)
    window.is_valid.copy_(torch.arange(4) < (numbers % 5)[:, None])
    result = sampled.clone()
    synthetic.force(result, window, table(numbers))
    for row, num_valid in enumerate((numbers % 5).tolist()):
        num_drafts = max(num_valid - 1, 0)
        assert torch.equal(result[row, :num_drafts], window.token_ids[row, 1 : 1 + num_drafts])
        assert torch.equal(result[row, num_drafts:], sampled[row, num_drafts:])


def test_first_tokens_are_the_models_beside_rounds_too(tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=3, synthetic_acceptance=(1.0, 1.0, 1.0), max_running=8
    )
    mixing = msgspec.structs.replace(config, mixed_above_tokens=0)
    engines = [LocalEngine(config), LocalEngine(mixing)]
    padded = PaddedLaunches(engines[1].engine.runner, StepGrid(row_counts(8), mixed_counts=(16,)))
    for engine in engines:
        for number in range(24):
            engine.submit([(7 * number + i) % 90 for i in range(1 + number % 9)], max_tokens=9 + number % 7)
            engine.step()
    first, others = ([output.token_ids[0] for output in engine.run().values()] for engine in engines)
    assert first == others
    assert len(set(first)) > 5
    assert len(padded.mixed) > 5


def test_an_engine_reports_the_rates_that_it_was_given(tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=3, synthetic_acceptance=RATES, max_running=8
    )
    engine = LocalEngine(config)
    assert engine.engine.info.synthetic_acceptance == RATES
    for seed in range(24):
        sampling = msgspec.structs.replace(GREEDY, seed=seed)
        engine.submit(range(5), max_tokens=100, sampling=sampling)
    outputs = engine.run()
    assert {len(output.token_ids) for output in outputs.values()} == {100}
    stats = engine.engine.scheduler.snapshot()
    num_drafted = stats.draft_tokens_per_position[2]
    for accepted, drafted, rate in zip(
        stats.accepted_tokens_per_position, stats.draft_tokens_per_position, RATES, strict=True
    ):
        assert abs(accepted / drafted - rate) < 4 * math.sqrt(rate * (1 - rate) / num_drafted)


def test_rates_that_change_while_requests_run_hold_from_the_next_round_on(tmp_path: Path) -> None:
    """In the same memory, since graphs were captured with it."""
    config = EngineConfig(
        model_path=str(random_mimo(tmp_path)), depth=3, synthetic_acceptance=(1.0, 1.0, 1.0), max_running=2
    )
    engine = LocalEngine(config)
    synthetic = engine.engine.runner.launcher.context.synthetic
    assert synthetic is not None
    address = synthetic.thresholds.data_ptr()
    engine.submit(range(5), max_tokens=200)
    accepted = []
    for rates in ((1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        synthetic.change_rates(rates)
        first = len(engine.outputs[0].events)
        for _ in range(8):
            engine.step()
        accepted.append({event.num_accepted for event in engine.outputs[0].events[first + 2 :]})
    assert accepted == [{3}, {1}, {0}]
    assert synthetic.thresholds.data_ptr() == address


def test_depth_0_is_left_alone(tmp_path: Path) -> None:
    config = EngineConfig(model_path=str(random_mimo(tmp_path)), depth=0, max_running=2)
    plain = LocalEngine(config).generate(range(5), max_tokens=20)
    synthetic = msgspec.structs.replace(config, synthetic_acceptance=RATES)
    assert LocalEngine(synthetic).generate(range(5), max_tokens=20) == plain
