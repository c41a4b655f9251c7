"""What one forward pass gets to know: which tokens, where they stand, where their keys and values go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from headway.kernels import DraftWindow, RoundWindow

# Attention's kernel of windows takes rows of so many queries, times the heads that share keys. It leaves partial results by
# the query: of so many those of a 7B model take 4 MiB for each 2,048 keys that a row's block table has places for.
MAX_WINDOW_QUERIES, QUERIES_OF_A_SEGMENT = 128, 256


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of equal width in the flat token list: tokens [first_token, first_token + rows * window).

    A decode round is one segment of `rows` windows; in a prefill neighbouring chunks of equal length share one.
    The query at window place w of a row stands at start_positions[row] + w and attends to every key of
    the row's blocks at or before its own position.
    """

    first_token: int
    rows: int
    window: int
    block_table: torch.Tensor  # [rows, max_blocks] int64, -1 where no block is granted
    start_positions: torch.Tensor  # [rows] int64
    end_positions: torch.Tensor | None = (
        None  # [rows] int64: no keys stand from there on; None: behind the window
    )
    is_prompt: bool = False  # attended by the kernel of prompts, however short


@dataclass(frozen=True, slots=True)
class Chunks:
    """Parts of prompts, whose number and lengths are data: tokens [first_tokens[i], + lengths[i]) of the flat list.

    The chunk's token w stands at start_positions[i] + w. Tokens of no chunk are padding. first_tokens count from
    first_token, where their part of the list begins.
    """

    block_table: torch.Tensor  # [chunks, max_blocks] int64, -1 where no block is granted
    first_tokens: torch.Tensor  # [chunks] int64
    lengths: torch.Tensor  # [chunks] int64; 0: no chunk
    start_positions: torch.Tensor  # [chunks] int64
    first_token: int = 0


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The flat tokens of all segments, then those of chunks."""

    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_mapping: torch.Tensor  # [tokens] int64: block id * block size + offset; -1: not written
    segments: tuple[Segment, ...]
    chunks: Chunks | None = None


def inputs_of(
    window: RoundWindow | DraftWindow,
    block_table: torch.Tensor,  # [rows, max_blocks] int64
) -> ForwardInputs:
    """One segment of equal windows, a row each."""
    num_rows, width = window.token_ids.shape
    return ForwardInputs(
        window.token_ids.flatten(),
        window.positions.flatten(),
        window.slot_mapping.flatten(),
        (Segment(0, num_rows, width, block_table, window.start_positions, window.end_positions),),
    )


def beside(first: ForwardInputs, second: ForwardInputs) -> ForwardInputs:
    """The tokens of both as one list, the first's before the second's; `first` has no chunks."""
    assert first.chunks is None, "chunks come last"
    count = len(first.token_ids)
    chunks = second.chunks
    return ForwardInputs(
        torch.cat([first.token_ids, second.token_ids]),
        torch.cat([first.positions, second.positions]),
        torch.cat([first.slot_mapping, second.slot_mapping]),
        (*first.segments, *(replace(s, first_token=count + s.first_token) for s in second.segments)),
        None if chunks is None else replace(chunks, first_token=count + chunks.first_token),
    )


def cut_to_windows(inputs: ForwardInputs, width: int) -> ForwardInputs:
    """The same tokens in windows of up to `width`: attention takes prompts by the kernel of decode rounds."""
    return replace(inputs, segments=tuple(part for s in inputs.segments for part in _cut(s, width)))


def _cut(segment: Segment, width: int) -> Iterator[Segment]:
    """70 tokens from position 100 on, width 32: windows at 100 and 132, behind them one of 6 tokens at 164."""
    assert segment.end_positions is None, "prompts end with their window"
    rest = segment.window % width
    if segment.window < width or rest == 0:
        yield from in_pieces(_in_windows(segment, min(segment.window, width)))
        return
    whole = segment.window - rest
    for index in range(segment.rows):
        row = _rows_of(segment, index, index + 1)
        yield from in_pieces(_in_windows(replace(row, window=whole), width))
        starts = row.start_positions + whole
        yield Segment(row.first_token + whole, 1, rest, row.block_table, starts)


def _in_windows(segment: Segment, width: int) -> Segment:
    """A row for each window; `width` divides the segment's."""
    count = segment.window // width
    steps = torch.arange(0, segment.window, width, device=segment.start_positions.device)
    return Segment(
        segment.first_token,
        segment.rows * count,
        width,
        segment.block_table.repeat_interleave(count, 0),
        (segment.start_positions[:, None] + steps).flatten(),
    )


def in_pieces(segment: Segment, most_queries: int = QUERIES_OF_A_SEGMENT) -> Iterator[Segment]:
    """The same rows, a few at a time, attended as windows are."""
    step = max(most_queries // segment.window, 1)
    for first in range(0, segment.rows, step):
        yield _rows_of(segment, first, min(first + step, segment.rows))


def _rows_of(segment: Segment, first: int, end: int) -> Segment:
    place = segment.first_token + first * segment.window
    table, starts = segment.block_table[first:end], segment.start_positions[first:end]
    return Segment(place, end - first, segment.window, table, starts)
