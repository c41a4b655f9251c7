"""How chunks of prompts become segments of one forward pass, and for how many tokens there are graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from headway.engine.execution.graphs import mixed_token_counts, token_counts
from headway.engine.execution.padded_prefill import prefills_of, smallest_prefill
from headway.engine.execution.prefill import prefill_inputs
from headway.engine.layers.inputs import Segment
from headway.engine.scheduling.plan import PrefillChunk
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


@pytest.mark.parametrize("fills_drafts", [False, True])
def test_what_prompts_take_is_captured_at_the_start(*, fills_drafts: bool) -> None:
    counts = token_counts(1024)
    captured = prefills_of(counts, fills_drafts=fills_drafts)
    for lengths in ([1], [32], [33], [1, 1], [513], [700, 300], [1024]):
        chunks = [PrefillChunk(0, 0, 0, (1,) * n, hidden_block_id=None, is_last=True) for n in lengths]
        assert smallest_prefill(chunks, counts, fills_drafts=fills_drafts) in captured


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
