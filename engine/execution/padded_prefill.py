"""A prefill of a fixed number of tokens, whatever chunks are in it, so that one CUDA graph can hold it.

Chunks come as one tensor of integers; all else is computed from it on the device. Tokens outside of chunks
are padding: they are computed, and written nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.execution.prefill import chunk_columns
from headway.engine.layers.inputs import ChunkTokens, ForwardInputs, RowTokens
from headway.engine.scheduling.plan import PrefillChunk
from headway.engine.speculation.drafter import PromptTokens
from headway.engine.state.row_tensors import RowTensors
from headway.kernels import QueryBatch, TokenSpans

MAX_CHUNKS = 64
_CHUNK_FIELDS = 5  # see chunk_columns
HEADER = MAX_CHUNKS * _CHUNK_FIELDS


def packed_chunks(chunks: Sequence[PrefillChunk], num_tokens: int) -> list[int]:
    """Returns HEADER integers, then num_tokens token ids. Missing chunks have length 0, and the row and hit
    of the first one."""
    columns, missing = chunk_columns(chunks), MAX_CHUNKS - len(chunks)
    rows, _, _, hits, _ = columns
    fills = (rows[0], 0, 0, hits[0], 0)
    header = [n for column, fill in zip(columns, fills, strict=True) for n in (*column, *[fill] * missing)]
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    return [*header, *token_ids, *[0] * (num_tokens - len(token_ids))]


def padded_chunks(
    packed: torch.Tensor,  # [HEADER + tokens] int64, as `packed_chunks` gives them
    rows: RowTensors,
    block_size: int,
    *,
    is_window: bool,
) -> PromptTokens:
    """Returns MAX_CHUNKS chunks, of which missing ones have length 0. is_window: attention treats the first
    one as a decode window."""
    token_ids = packed[HEADER:]
    chunk_rows, starts, lengths, hits, is_generated = packed[:HEADER].view(_CHUNK_FIELDS, MAX_CHUNKS)
    ends = lengths.cumsum(0)
    firsts = ends - lengths
    places = torch.arange(len(token_ids), device=packed.device)
    chunk_of_token = torch.searchsorted(ends, places, right=True).clamp_(max=MAX_CHUNKS - 1)
    is_token = places < ends[-1]
    positions = torch.where(is_token, places + (starts - firsts)[chunk_of_token], 0)
    tables = rows.granted_block_ids.index_select(0, chunk_rows)
    blocks = tables[chunk_of_token, positions // block_size]
    slot_mapping = torch.where(is_token, blocks * block_size + positions % block_size, -1)
    if is_window:
        end_of_first = starts[:1] + lengths[:1]
        batch = QueryBatch.of_windows(tables[:1], starts[:1], len(token_ids), end_positions=end_of_first)
    else:
        batch = QueryBatch.of_chunks(tables, starts, lengths, firsts, len(token_ids))
    spans = TokenSpans(chunk_rows, firsts, lengths, is_generated > 0)
    by_row = RowTokens(rows.state_ids, chunks=ChunkTokens(spans))
    inputs = ForwardInputs(token_ids, positions, slot_mapping, (batch,), by_row)
    # Missing chunks write what the first chunk writes, which begins at index 0.
    first_places = torch.where(lengths > 0, firsts, 0)
    last_places = torch.where(lengths > 0, ends, lengths[0]) - 1
    return PromptTokens(inputs, chunk_rows, lengths, first_places, last_places, hits)
