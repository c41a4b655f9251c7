"""Builds the inputs of a forward pass over chunks of prompts.

Knows tensors only: other modules decide which chunks are computed, and what follows them. Nothing here waits
for the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, groupby

import torch

from headway.engine.layers.inputs import ChunkTokens, ForwardInputs, RowTokens
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state.row_tensors import RowTensors
from headway.engine.state.transfer import to_device
from headway.kernels import QueryBatch, TokenSpans, max_prompt_rows, splits_keys


def chunk_columns(chunks: Sequence[PrefillChunk]) -> list[list[int]]:
    """Returns the rows of the chunks, their start positions, lengths and blocks of the hidden state before
    them (-1: the row's own), and whether their tokens were generated."""
    return [
        [chunk.row for chunk in chunks],
        [chunk.start for chunk in chunks],
        [len(chunk.token_ids) for chunk in chunks],
        [-1 if chunk.hidden_block_id is None else chunk.hidden_block_id for chunk in chunks],
        [int(chunk.is_generated) for chunk in chunks],
    ]


def first_places(chunks: Sequence[PrefillChunk]) -> list[int]:
    """Returns the index of each chunk's first token in the flat list of all tokens."""
    return [0, *accumulate(len(chunk.token_ids) for chunk in chunks)][: len(chunks)]


def last_places(chunks: Sequence[PrefillChunk]) -> list[int]:
    """Returns the indices of the prompts' last tokens in the flat list: one for each chunk with is_last."""
    firsts = zip(first_places(chunks), chunks, strict=True)
    return [first + len(chunk.token_ids) - 1 for first, chunk in firsts if chunk.is_last]


def prefill_inputs(
    chunks: Sequence[PrefillChunk], rows: RowTensors, block_size: int, *, gqa_group_sizes: Collection[int]
) -> PromptTokens:
    """Builds the inputs of one forward pass; neighbouring chunks of equal length share a batch.

    gqa_group_sizes: those of all layers, which share the batches.
    """
    device = rows.limits.device
    token_ids = to_device([token for chunk in chunks for token in chunk.token_ids], device)
    columns = to_device([*chunk_columns(chunks), first_places(chunks)], device)
    chunk_rows, starts, lengths, hits, is_generated, firsts = columns
    spans = TokenSpans(chunk_rows, firsts, lengths, is_generated > 0)
    chunk_of_token = torch.repeat_interleave(lengths, output_size=len(token_ids))
    places = torch.arange(len(token_ids), device=device)
    positions = places + (starts - firsts)[chunk_of_token]
    blocks = rows.granted_block_ids[chunk_rows[chunk_of_token], positions // block_size]
    inputs = ForwardInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        batches=tuple(
            _batches(
                chunks,
                rows.granted_block_ids.index_select(0, chunk_rows),
                starts,
                block_size=block_size,
                gqa_group_sizes=gqa_group_sizes,
            )
        ),
        rows=RowTokens(rows.state_ids, chunks=ChunkTokens(spans)),
    )
    return PromptTokens(inputs, chunk_rows, lengths, firsts, firsts + lengths - 1, hits)


def _batches(
    chunks: Sequence[PrefillChunk],
    tables: torch.Tensor,  # [chunks, max_blocks] int64
    starts: torch.Tensor,  # [chunks] int64
    *,
    block_size: int,
    gqa_group_sizes: Collection[int],
) -> Iterator[QueryBatch]:
    """Yields a batch for each run of chunks with the same length and kernel, or several if there are too many
    rows."""
    first = first_token = 0
    for (length, _), group in groupby(chunks, lambda chunk: (len(chunk.token_ids), splits_keys(chunk.start))):
        cached = [chunk.start for chunk in group]
        most_cached = max(cached)
        max_keys = tables.shape[1] * block_size
        limits = [max_prompt_rows(length, size, most_cached, max_keys) for size in gqa_group_sizes]
        most_rows = min((limit for limit in limits if limit is not None), default=None)
        end = first + len(cached)
        while first < end:
            some = slice(first, min(first + (most_rows or len(cached)), end))
            yield QueryBatch.of_windows(
                tables[some], starts[some], length, first_token=first_token, most_cached=most_cached
            )
            first_token += (some.stop - first) * length
            first = some.stop
