"""The cost table against tables that are known: completion, context, prompts, drift and outliers."""

from __future__ import annotations

import random

import pytest

from headway.engine.scheduling.depth.costs import CostTable, RoundLoad

ROW_COUNTS = (1, 2, 4, 8)
# The slope of a cached token with k drafts, in seconds; its part of the slope without drafts is not the
# expected one.
CONTEXT_SECONDS = [4e-7, 4.1e-7, 4.2e-7, 4.4e-7]


def base(rows: int, depth: int) -> float:
    return 4e-3 + 1e-4 * rows * (depth + 1)


def measured(rows: tuple[int, ...] = ROW_COUNTS, max_depth: int = 3) -> dict[tuple[int, int], float]:
    return {(n, depth): base(n, depth) for n in rows for depth in range(max_depth + 1)}


def truth(load: RoundLoad, depth: int) -> float:
    """Prompt tokens cost a 7B model on an H100 about 30 us each."""
    context = CONTEXT_SECONDS[depth] * load.num_context_tokens
    return base(load.num_rows, depth) + context + 3e-5 * load.num_prompt_tokens


def test_what_was_measured_is_told() -> None:
    table = CostTable(ROW_COUNTS, 3, measured())
    for rows in ROW_COUNTS:
        assert table.seconds(RoundLoad(rows)) == pytest.approx([base(rows, depth) for depth in range(4)])


def test_rows_are_padded_to_the_next_size() -> None:
    table = CostTable(ROW_COUNTS, 3, measured())
    assert table.seconds(RoundLoad(5)) == table.seconds(RoundLoad(8))
    assert table.seconds(RoundLoad(9)) == table.seconds(RoundLoad(8)), "more rows do not exist"


def test_sizes_between_and_beyond_lie_on_a_line() -> None:
    table = CostTable((1, 2, 4, 8, 16), 3, measured((1, 8)))
    for rows in (2, 4, 16):
        assert table.seconds(RoundLoad(rows)) == pytest.approx([base(rows, depth) for depth in range(4)])


def test_a_size_alone_serves_for_all() -> None:
    table = CostTable(ROW_COUNTS, 1, measured((2,), 1))
    assert (
        table.seconds(RoundLoad(8)) == table.seconds(RoundLoad(1)) == pytest.approx([base(2, 0), base(2, 1)])
    )


def test_a_slow_measurement_of_a_small_round_is_cut_to_what_larger_ones_took() -> None:
    """Another process makes a round longer, never shorter."""
    table = CostTable(ROW_COUNTS, 3, measured() | {(2, 0): 1.0, (1, 3): 1.0})
    columns = [table.seconds(RoundLoad(rows)) for rows in ROW_COUNTS]
    assert all(line == sorted(line) for line in [*columns, *map(list, zip(*columns, strict=True))])
    assert columns[-1] == pytest.approx([base(8, depth) for depth in range(4)]), "the others stay"
    assert max(map(max, columns)) < 8e-3


def learnt(loads: list[tuple[RoundLoad, int]], *, noise: float = 0.0, slower: float = 1.0) -> CostTable:
    table, chance = CostTable(ROW_COUNTS, 3, measured()), random.Random(0)
    for load, depth in loads:
        table.learn(load, depth, truth(load, depth) * slower * chance.gauss(1, noise))
    return table


def test_context_that_was_seen_at_one_depth_is_known_at_all() -> None:
    table = learnt([(RoundLoad(8, 8 * 8192), 3)] * 50)
    load = RoundLoad(8, 8 * 4096)
    assert table.seconds(load) == pytest.approx([truth(load, depth) for depth in range(4)], rel=0.02)


def test_context_that_was_seen_at_each_depth_is_known_exactly() -> None:
    loads = [
        (RoundLoad(rows, rows * 1000 * k), depth) for rows in (4, 8) for k in (1, 8) for depth in range(4)
    ]
    table = learnt(loads * 20)
    for load, depth in loads:
        assert table.seconds(load)[depth] == pytest.approx(truth(load, depth), rel=2e-3)


def test_a_context_that_grows_is_followed_through_noise() -> None:
    loads = [(RoundLoad(8, 8 * (128 + n)), n % 4) for n in range(4000)]
    table = learnt(loads, noise=0.02)
    load = RoundLoad(8, 8 * 4096)
    assert table.seconds(load) == pytest.approx([truth(load, depth) for depth in range(4)], rel=0.02)


def test_prompts_beside_a_round_cost_by_the_token() -> None:
    """Before any was seen, a token costs what one more does in the largest rounds: 25 us here, with a draft
    of its own."""
    first = CostTable(ROW_COUNTS, 3, measured()).seconds(RoundLoad(8, 0, 256))
    assert first == pytest.approx([base(8, depth) + 256 * 1e-4 for depth in range(4)])
    table = learnt([(RoundLoad(8, 0, count), 3) for count in (128, 256, 384)] * 200)
    load = RoundLoad(4, 0, 256)
    assert table.seconds(load) == pytest.approx([truth(load, depth) for depth in range(4)], rel=0.01)


def test_a_device_that_slows_down_does_so_at_all_depths() -> None:
    """Depths that were not tried since must not look cheap for it. Its first round counts as a depth's
    own."""
    table = learnt([(RoundLoad(8), 2)] * 300, slower=1.3)
    assert table.seconds(RoundLoad(8)) == pytest.approx([1.3 * base(8, depth) for depth in range(4)], rel=0.1)


def test_a_device_that_recovers_does_so_at_depths_that_were_seen_while_it_was_slow() -> None:
    """Else they look dear for ever, and are not tried again."""
    table = learnt([(RoundLoad(8), depth) for depth in range(4)] * 40, slower=2.0)
    for _ in range(100):
        table.learn(RoundLoad(8), 1, base(8, 1))
    assert table.seconds(RoundLoad(8)) == pytest.approx([base(8, depth) for depth in range(4)], rel=0.15)


def test_a_depth_that_was_measured_wrong_is_corrected_by_its_own_rounds() -> None:
    table = CostTable(ROW_COUNTS, 3, measured() | {(8, 3): 1.1 * base(8, 3)})
    for n in range(400):
        table.learn(RoundLoad(8), n % 4, base(8, n % 4))
    assert table.seconds(RoundLoad(8)) == pytest.approx([base(8, depth) for depth in range(4)], rel=0.01)


def test_one_round_that_took_a_second_changes_little() -> None:
    table = learnt([(RoundLoad(8), 3)] * 50)
    table.learn(RoundLoad(8), 3, 1.0)
    plain, *_, deepest = table.seconds(RoundLoad(8))
    assert deepest / plain == pytest.approx(base(8, 3) / base(8, 0), rel=0.03)
    assert deepest < 1.4 * base(8, 3)


def test_catching_up_takes_more_for_more_rows_and_no_more_for_each() -> None:
    """What was measured too long is cut, and never makes what follows negative."""
    table = CostTable(ROW_COUNTS, 3, measured(), {1: 0.012, 8: 0.009, 16: 0.02})
    assert [table.catch_up_seconds(n) for n in (1, 8)] == [0.009, 0.009]
    assert table.catch_up_seconds(256) <= 0.02 * 256 / 16
    found = [table.catch_up_seconds(n) for n in ROW_COUNTS]
    assert found == sorted(found)
    assert CostTable(ROW_COUNTS, 3, measured()).catch_up_seconds(8) == 0, "it never has to"
