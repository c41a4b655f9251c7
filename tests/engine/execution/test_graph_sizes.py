"""From some captured graphs the memory of all is told."""

from __future__ import annotations

from headway.engine.execution.graph_sizes import TakenMemory, extrapolated_bytes, sampled_keys
from headway.engine.execution.step_key import StepGrid, StepKey
from headway.engine.scheduling.prefill_policy import PrefillPolicy

MIB = 1 << 20


def captured() -> list[StepKey]:
    grid = StepGrid.of(256, 1024, 384)
    policy = PrefillPolicy(8192, 1024, 384, mixed_above_tokens=8)
    return grid.captured(range(4), policy, catches_up=True)


def test_the_largest_step_of_each_kind_is_sampled_and_every_sixteenth() -> None:
    keys = captured()
    some = sampled_keys(keys)
    assert some == [key for key in keys if key in set(some)], "the largest first"
    assert len(keys) / 16 <= len(some) <= len(keys) / 16 + 5
    largest = {
        StepKey(256, 3, 384),
        StepKey(num_prompt_tokens=1024),
        StepKey(256, 3),
        max((key for key in keys if key.catches_up), key=lambda key: key.num_rows),
    }
    assert largest <= set(some)


def test_what_only_one_step_takes_is_counted_once_and_what_each_graph_takes_for_each() -> None:
    """48 prompt tokens of 100 bytes are kept by the graphs that were not captured."""
    keys = [StepKey(num_prompt_tokens=n) for n in (64, 32, 16)] + [StepKey(8)]
    taken = extrapolated_bytes(keys, [keys[0], keys[3]], 300 * MIB, 10 * MIB, prompt_token_bytes=100)
    assert taken == 300 * MIB + 4800 + 20 * MIB
    assert extrapolated_bytes(keys, keys, 300 * MIB, 10 * MIB, prompt_token_bytes=100) == 310 * MIB


def test_memory_that_others_give_back_meanwhile_is_no_graphs() -> None:
    before = TakenMemory(900 * MIB, 100 * MIB)
    assert TakenMemory(960 * MIB, 150 * MIB).since(before) == (50 * MIB, 10 * MIB)
    assert TakenMemory(700 * MIB, 150 * MIB).since(before) == (50 * MIB, 0)
