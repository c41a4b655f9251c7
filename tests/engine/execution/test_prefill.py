"""How chunks of prompts become segments of one forward pass, and for how many tokens there are graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headway.engine.execution.prefill import prefill_inputs
from headway.engine.execution.step_key import StepGrid, StepKey, mixed_token_counts, token_counts
from headway.engine.layers.inputs import Segment
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.scheduling.prefill_policy import PrefillPolicy
from headway.engine.state.row_tensors import RowTensors

BLOCK_SIZE, MAX_BLOCKS = 16, 1024


def segments_of(
    chunks: Sequence[tuple[int, int]],
    *,
    sharing: int = 1,
    block_size: int = BLOCK_SIZE,
) -> tuple[Segment, ...]:
    """chunks: (first position, tokens), a row each."""
    cpu = torch.device("cpu")
    slots = RowTensors.allocate(
        len(chunks), max_blocks=MAX_BLOCKS, max_pending=1, hidden_size=1, dtype=torch.float32, device=cpu
    )
    slots.granted_block_ids.copy_(torch.arange(len(chunks) * MAX_BLOCKS).view(-1, MAX_BLOCKS))
    made = [
        PrefillChunk(row, row, start, (0,) * length, hidden_block_id=None, is_last=True)
        for row, (start, length) in enumerate(chunks)
    ]
    inputs = prefill_inputs(made, slots, block_size, sharing=sharing).inputs
    return inputs.segments


def queries_of(segments: Sequence[Segment]) -> list[tuple[int, int, int]]:
    """(place in the flat list, position, the row's first block) of each, in the order of the segments."""
    return [
        (s.first_token + row * s.window + w, int(s.start_positions[row]) + w, int(s.block_table[row, 0]))
        for s in segments
        for row in range(s.rows)
        for w in range(s.window)
    ]


@pytest.mark.parametrize("most", [1, 16, 40, 512, 700, 1024, 8192])
def test_graphs_are_for_ever_more_tokens_as_far_as_steps_go(most: int) -> None:
    """Alone up to 1,024, beside a round up to 640."""
    for counts, limit in ((token_counts(most), 1024), (mixed_token_counts(most), 384)):
        assert list(counts) == sorted(set(counts))
        assert counts[-1] <= min(most, limit)
    assert (token_counts(8192)[-1], mixed_token_counts(8192)[-1]) == (1024, 384)


@pytest.mark.parametrize("depths", [(0,), (0, 1, 2, 3)])
def test_steps_are_captured_at_the_start(depths: tuple[int, ...]) -> None:
    """Every pass of prompts, every plain round, and every mixed pass that the policy plans; none twice."""
    grid = StepGrid.of(40, 1024, 384)
    policy = PrefillPolicy.uniform(512, mixed_above_tokens=8)
    captured = grid.captured(depths, policy)
    assert len(set(captured)) == len(captured)
    for lengths in ([1], [32], [33], [1, 1], [513], [700, 300], [1024]):
        assert grid.prompts(chunks_of(lengths)) in captured
    for num_rows in range(1, 41):
        for depth in depths:
            assert grid.round(StepKey(num_rows, depth)) in captured
        wanted = StepKey(num_rows, max(depths))
        num_tokens = num_rows * (max(depths) + 1)
        for length in range(1, policy.mixed_with(num_tokens) + 1, 37):
            if num_tokens > 8:
                assert grid.mixed(wanted, chunks_of([length])) in captured


def test_what_no_padded_step_holds_has_no_key() -> None:
    grid = StepGrid((1, 4), (16, 64), (32,))
    far = PrefillChunk(0, 0, 9000, (1,) * 8, hidden_block_id=None, is_last=True)
    assert grid.prompts(chunks_of([65])) is None
    assert grid.prompts(chunks_of([1] * 65)) is None
    assert grid.prompts([far, *chunks_of([1])]) is None
    assert grid.prompts([far]) == StepKey(num_prompt_tokens=16, is_window=True), "as a decode window"
    assert grid.mixed(StepKey(3, 2), chunks_of([33])) is None
    assert grid.mixed(StepKey(3, 2), [far]) is None
    assert grid.mixed(StepKey(3, 2), chunks_of([20])) == StepKey(4, 2, 32)
    assert StepGrid.of(4).prompts(chunks_of([1])) is None, "prompts are not padded"
    assert StepGrid.of(4).mixed(StepKey(3, 2), chunks_of([1])) is None


def chunks_of(lengths: Sequence[int]) -> list[PrefillChunk]:
    return [PrefillChunk(0, 0, 0, (1,) * n, hidden_block_id=None, is_last=True) for n in lengths]


def test_neighbours_of_equal_length_share_a_segment() -> None:
    segments = segments_of([(0, 30), (5, 30), (0, 31)])
    assert [(s.rows, s.window) for s in segments] == [(2, 30), (1, 31)]


@pytest.mark.parametrize(("block_size", "most"), [(16, 256), (32, 256), (64, 128)])
@pytest.mark.parametrize("length", [1, 20, 32])
def test_many_rows_far_behind_share_no_segment_whose_partial_results_are_large(
    length: int, block_size: int, most: int
) -> None:
    """Windows leave some for each query and 2,048 places of the table: 64 questions of 20 tokens about one long text once
    took 340 MB."""
    chunks = [(10_000, length)] * 64
    segments = segments_of(chunks, sharing=4, block_size=block_size)
    assert all(s.rows * s.window <= most and not s.is_prompt for s in segments)
    assert len(segments) == -(-64 // (most // length))
    expected = [(row * length + w, 10_000 + w, row * MAX_BLOCKS) for row in range(64) for w in range(length)]
    assert queries_of(segments) == expected


@pytest.mark.parametrize(("start", "length"), [(10_000, 33), (10_000, 300), (100, 20)])
def test_many_rows_stay_together_where_they_leave_none(start: int, length: int) -> None:
    """The kernel of prompts attends them: too wide for a window, or near."""
    (segment,) = segments_of([(start, length)] * 64, sharing=4)
    assert (segment.rows, segment.window, segment.is_prompt) == (64, length, start == 100)
