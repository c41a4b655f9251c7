"""Chunks of prompts as one forward pass.

Tensors only; which chunks are computed, and what comes after them, others decide. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

import torch

from headway.engine.layers.inputs import (
    MAX_WINDOW_QUERIES,
    QUERIES_OF_A_SEGMENT,
    ForwardInputs,
    Segment,
    in_pieces,
)
from headway.engine.scheduling.plan import PrefillChunk, is_far
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.transfer import to_device

# Behind block tables for more tokens fewer queries share a segment of windows.
_LONG_TABLE = 32_768


def first_places(chunks: Sequence[PrefillChunk]) -> list[int]:
    """Of each chunk's first token in the flat list, the chunks one behind the other."""
    return [0, *accumulate(len(chunk.token_ids) for chunk in chunks)][: len(chunks)]


def last_places(chunks: Sequence[PrefillChunk]) -> list[int]:
    """Of the prompts' last tokens in the flat list: of each chunk with is_last."""
    firsts = zip(first_places(chunks), chunks, strict=True)
    return [first + len(chunk.token_ids) - 1 for first, chunk in firsts if chunk.is_last]


def prefill_inputs(
    chunks: Sequence[PrefillChunk],
    slots: RowTensors,
    block_size: int,
    *,
    sharing: int,
) -> PromptTokens:
    """Builds the inputs of one forward pass; neighbouring chunks of equal length share a segment.

    sharing: query heads that share keys.
    """
    device = slots.limits.device
    token_ids = to_device([token for chunk in chunks for token in chunk.token_ids], device)
    shape = to_device(
        [
            [chunk.row for chunk in chunks],
            [chunk.start for chunk in chunks],
            [len(chunk.token_ids) for chunk in chunks],
            first_places(chunks),
            [-1 if chunk.hidden_block_id is None else chunk.hidden_block_id for chunk in chunks],
        ],
        device,
    )
    rows, starts, lengths, firsts, hits = shape
    chunk_of_token = torch.repeat_interleave(lengths, output_size=len(token_ids))
    places = torch.arange(len(token_ids), device=device)
    positions = places + (starts - firsts)[chunk_of_token]
    blocks = slots.granted_block_ids[rows[chunk_of_token], positions // block_size]
    tables = slots.granted_block_ids.index_select(0, rows)
    inputs = ForwardInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        segments=tuple(
            part
            for segment in _segments(chunks, tables, starts)
            for part in _bounded(segment, block_size, sharing)
        ),
    )
    return PromptTokens(inputs, rows, lengths, firsts, firsts + lengths - 1, hits)


def _segments(
    chunks: Sequence[PrefillChunk],
    tables: torch.Tensor,  # [chunks, max_blocks] int64
    starts: torch.Tensor,  # [chunks] int64
) -> tuple[Segment, ...]:
    """One segment for each run of chunks that have one length and one attention kernel."""
    kinds = ((len(chunk.token_ids), is_far(chunk.start)) for chunk in chunks)
    segments: list[Segment] = []
    first = place = 0
    for (length, stands_far), group in groupby(kinds):
        rows = sum(1 for _ in group)
        which = slice(first, first + rows)
        segments.append(Segment(place, rows, length, tables[which], starts[which], is_prompt=not stands_far))
        first += rows
        place += rows * length
    return tuple(segments)


def _bounded(segment: Segment, block_size: int, sharing: int) -> Iterable[Segment]:
    """In pieces where windows are attended, whose partial results are many if rows are."""
    if segment.is_prompt or segment.window * sharing > MAX_WINDOW_QUERIES:
        return (segment,)
    num_places = max(segment.block_table.shape[1] * block_size, _LONG_TABLE)
    return in_pieces(segment, QUERIES_OF_A_SEGMENT * _LONG_TABLE // num_places)
