"""Windows of a prompt stand for the same queries as the whole prompt does."""

from __future__ import annotations

import pytest
import torch

from headway.engine.layers.inputs import (
    QUERIES_OF_A_SEGMENT,
    ForwardInputs,
    Segment,
    cut_to_windows,
)

WIDTH = 8


def inputs_of(*segments: Segment) -> ForwardInputs:
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardInputs(nothing, nothing, nothing, segments)


def queries_of(segments: tuple[Segment, ...]) -> list[tuple[int, int, list[int]]]:
    """(place in the flat list, position, blocks) of each, in the order of the segments."""
    return [
        (s.first_token + row * s.window + w, int(s.start_positions[row]) + w, s.block_table[row].tolist())
        for s in segments
        for row in range(s.rows)
        for w in range(s.window)
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [1, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH, 3 * WIDTH + 5, 600])
def test_every_query_keeps_its_place_position_and_blocks(rows: int, window: int) -> None:
    tables = torch.arange(2 * rows).view(rows, 2)
    whole = inputs_of(
        Segment(0, 1, 2, tables[:1] + 50, torch.tensor([4])),
        Segment(2, rows, window, tables, 100 * torch.arange(rows)),
    )
    cut = cut_to_windows(whole, WIDTH)
    assert queries_of(cut.segments) == queries_of(whole.segments)
    for segment in cut.segments:
        assert segment.window <= WIDTH
        assert segment.rows * segment.window <= QUERIES_OF_A_SEGMENT
        assert len(segment.block_table) == len(segment.start_positions) == segment.rows
