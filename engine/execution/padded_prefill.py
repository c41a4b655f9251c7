"""A prefill of a fixed number of tokens, whatever chunks are in it: what one CUDA graph can hold.

Chunks come as one tensor of integers; what follows from them is computed on the device. Tokens of no chunk are
padding: they are computed, and written nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway.engine.layers.causal_lm import CausalLM
from headway.engine.layers.inputs import Chunks, ForwardInputs, Segment
from headway.engine.scheduling.plan import PrefillChunk, is_near
from headway.engine.speculation.drafter import Drafter, PromptTokens
from headway.engine.state.pool import StatePool
from headway.engine.state.row_tensors import RowTensors

MAX_CHUNKS = 64
# Of each chunk: its row, start position, length and the block of the hidden state before it, -1: the row's own.
_CHUNK_FIELDS = 4
HEADER = MAX_CHUNKS * _CHUNK_FIELDS
# One chunk of so few tokens is attended as a window, whose keys the device shares out: a short turn of a long chat.
# Several take a program for each head and tile of queries: what no graph makes up for where they stand FAR behind.
_WINDOW_TOKENS = 32


class Prefill(NamedTuple):
    """What one graph is made for. fills_drafts: the drafter sees the tokens, too. is_window: for one short chunk."""

    num_tokens: int
    fills_drafts: bool
    is_window: bool


def padded_count(chunks: Sequence[PrefillChunk], token_counts: Sequence[int]) -> int | None:
    """That of the token counts, ascending, which holds the chunks, if any does."""
    needed = sum(len(chunk.token_ids) for chunk in chunks)
    if needed > token_counts[-1] or len(chunks) > MAX_CHUNKS:
        return None
    return next(count for count in token_counts if count >= needed)


def smallest_prefill(
    chunks: Sequence[PrefillChunk], token_counts: Sequence[int], *, fills_drafts: bool
) -> Prefill | None:
    """That of one of the token counts, ascending, which holds the chunks; None: they are better off without."""
    num_tokens = padded_count(chunks, token_counts)
    if num_tokens is None:
        return None
    is_window = len(chunks) == 1 and num_tokens <= _WINDOW_TOKENS
    return Prefill(num_tokens, fills_drafts, is_window) if is_window or is_near(chunks) else None


def prefills_of(token_counts: Sequence[int], *, fills_drafts: bool) -> list[Prefill]:
    """All that `smallest_prefill` may choose."""
    windows = [Prefill(count, fills_drafts, True) for count in token_counts if count <= _WINDOW_TOKENS]
    return windows + [Prefill(count, fills_drafts, False) for count in token_counts]


def packed_chunks(chunks: Sequence[PrefillChunk], num_tokens: int) -> list[int]:
    """HEADER integers, then num_tokens token ids. Chunks that do not exist have no length, and the first one's row and hit."""
    missing = MAX_CHUNKS - len(chunks)
    rows = [chunk.row for chunk in chunks] + [chunks[0].row] * missing
    starts = [chunk.start for chunk in chunks] + [0] * missing
    lengths = [len(chunk.token_ids) for chunk in chunks] + [0] * missing
    found = (chunk.hidden_block_id for chunk in chunks)
    hits = [-1 if block_id is None else block_id for block_id in found]
    hits += [hits[0]] * missing
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    return [*rows, *starts, *lengths, *hits, *token_ids, *([0] * (num_tokens - len(token_ids)))]


@dataclass(frozen=True, slots=True)
class PaddedChunks:
    """What follows from packed chunks. Chunks that do not exist have no length."""

    tokens: PromptTokens  # of MAX_CHUNKS chunks
    lengths: torch.Tensor  # [MAX_CHUNKS] int64

    @property
    def inputs(self) -> ForwardInputs:
        return self.tokens.inputs

    def last_places(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64: of each row's last token in the list; -1: none of its tokens are there."""
        rows = self.tokens.rows
        row = torch.arange(num_rows, device=rows.device)
        is_of_row = (rows == row[:, None]) & (self.lengths > 0)
        return torch.where(is_of_row, self.tokens.last_places, -1).amax(1)


def padded_chunks(
    packed: torch.Tensor,  # [HEADER + tokens] int64, as `packed_chunks` gives them
    slots: RowTensors,
    block_size: int,
    *,
    is_window: bool,
) -> PaddedChunks:
    token_ids = packed[HEADER:]
    rows, starts, lengths, hits = packed[:HEADER].view(_CHUNK_FIELDS, MAX_CHUNKS)
    ends = lengths.cumsum(0)
    firsts = ends - lengths
    places = torch.arange(len(token_ids), device=packed.device)
    chunk_of_token = torch.searchsorted(ends, places, right=True).clamp_(max=MAX_CHUNKS - 1)
    is_token = places < ends[-1]
    positions = torch.where(is_token, places + (starts - firsts)[chunk_of_token], 0)
    tables = slots.granted_block_ids.index_select(0, rows)
    blocks = tables[chunk_of_token, positions // block_size]
    slot_mapping = torch.where(is_token, blocks * block_size + positions % block_size, -1)
    segments: tuple[Segment, ...] = ()
    chunks = None
    if is_window:
        segments = (Segment(0, 1, len(token_ids), tables[:1], starts[:1], starts[:1] + lengths[:1]),)
    else:
        chunks = Chunks(tables, firsts, lengths, starts)
    inputs = ForwardInputs(token_ids, positions, slot_mapping, segments, chunks)
    # Chunks that do not exist write what the first one writes, which begins at place 0.
    first_places = torch.where(lengths > 0, firsts, 0)
    last_places = torch.where(lengths > 0, ends, lengths[0]) - 1
    return PaddedChunks(PromptTokens(inputs, rows, first_places, last_places, hits), lengths)


def padded_prefill(
    model: CausalLM,
    pool: StatePool,
    slots: RowTensors,
    drafter: Drafter,
    packed: torch.Tensor,  # [HEADER + tokens] int64, as `packed_chunks` gives them
    wanted: Prefill,
) -> torch.Tensor:  # [tokens, hidden]
    """Returns the target's hidden states; keys, values and, with fills_drafts, what the drafter keeps are written."""
    chunks = padded_chunks(packed, slots, pool.block_size, is_window=wanted.is_window)
    hidden = model.forward(chunks.inputs, pool)
    if wanted.fills_drafts:
        drafter.observe_prompts(chunks.tokens, hidden)
    return hidden
