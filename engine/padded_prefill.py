"""A prefill of a fixed number of tokens, whatever chunks are in it: what one CUDA graph can hold.

Chunks come as one tensor of integers; what follows from them is computed on the device. Tokens of no chunk are
padding: they are computed, and written nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.engine.batch import PrefillChunk
from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import Chunks, ForwardInputs
from headway.engine.models.registry import CausalLM
from headway.engine.slots import SlotTable

MAX_CHUNKS = 64
# Of each chunk: its row, start position, length and the block of the hidden state before it, -1: the row's own.
_CHUNK_FIELDS = 4
HEADER = MAX_CHUNKS * _CHUNK_FIELDS


def packed_chunks(chunks: Sequence[PrefillChunk], num_tokens: int) -> list[int]:
    """HEADER integers, then num_tokens token ids. Chunks that do not exist have no length, and the first one's row."""
    missing = MAX_CHUNKS - len(chunks)
    rows = [chunk.row for chunk in chunks] + [chunks[0].row] * missing
    starts = [chunk.start for chunk in chunks] + [0] * missing
    lengths = [len(chunk.token_ids) for chunk in chunks] + [0] * missing
    hits = [-1 if chunk.hidden_block_id is None else chunk.hidden_block_id for chunk in chunks] + [
        -1
    ] * missing
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    return [*rows, *starts, *lengths, *hits, *token_ids, *([0] * (num_tokens - len(token_ids)))]


def padded_prefill(
    model: CausalLM,
    pool: KVPool,
    slots: SlotTable,
    packed: torch.Tensor,  # [HEADER + tokens] int64, as `packed_chunks` gives them
    *,
    fills_drafts: bool,
) -> torch.Tensor:  # [tokens, hidden]
    """The trunk's hidden states; keys, values and, with fills_drafts, what the MTP layer keeps are written.

    `prefill_inputs` and `fill_draft_cache` do the same for chunks that the host knows.
    """
    token_ids = packed[HEADER:]
    rows, starts, lengths, hits = packed[:HEADER].view(_CHUNK_FIELDS, MAX_CHUNKS)
    through = lengths.cumsum(0)
    firsts = through - lengths
    places = torch.arange(len(token_ids), device=packed.device)
    chunk_of_token = torch.searchsorted(through, places, right=True).clamp_(max=MAX_CHUNKS - 1)
    is_token = places < through[-1]
    positions = torch.where(is_token, places + (starts - firsts)[chunk_of_token], 0)
    tables = slots.granted_block_ids.index_select(0, rows)
    blocks = tables[chunk_of_token, positions // pool.block_size]
    slot_mapping = torch.where(is_token, blocks * pool.block_size + positions % pool.block_size, -1)
    inputs = ForwardInputs(
        token_ids, positions, slot_mapping, segments=(), chunks=Chunks(tables, firsts, lengths, starts)
    )
    hidden = model.forward(inputs, pool)
    if fills_drafts:
        states = model.draft_hidden(hidden)
        before = slots.chunk_hidden.index_select(0, rows)
        if pool.block_hidden is not None:
            before = torch.where((hits < 0)[:, None], before, pool.block_hidden[hits])
        is_first = (places == firsts[chunk_of_token])[:, None]
        previous = torch.where(is_first, before[chunk_of_token], states.roll(1, 0))
        # Chunks that do not exist write what the first one writes.
        lasts = torch.where(lengths > 0, through, lengths[0]) - 1
        slots.chunk_hidden.index_copy_(0, rows, states.index_select(0, lasts))
        pool.keep_hidden(slot_mapping, states)
        pairs = ForwardInputs(
            token_ids, positions, torch.where(positions == 0, -1, slot_mapping), (), inputs.chunks
        )
        model.fill_draft_cache(pairs, previous, pool)
    return hidden
