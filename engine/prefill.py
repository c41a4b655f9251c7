"""Chunks of prompts as one forward pass, and what the MTP layer gets to see of them.

Tensors only; which chunks are computed, and what comes after them, others decide. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from headway.engine.batch import PrefillChunk
from headway.engine.cache.pool import KVPool
from headway.engine.models.inputs import ForwardInputs, Segment
from headway.engine.models.registry import CausalLM
from headway.engine.slots import SlotTable
from headway.engine.transfer import to_device


def first_places(chunks: Sequence[PrefillChunk]) -> list[int]:
    """Of each chunk's first token in the flat list, the chunks one behind the other."""
    return [0, *accumulate(len(chunk.token_ids) for chunk in chunks)][: len(chunks)]


def prefill_inputs(chunks: Sequence[PrefillChunk], slots: SlotTable, block_size: int) -> ForwardInputs:
    """Neighbours of equal length share a segment."""
    device = slots.limits.device
    token_ids = to_device([token for chunk in chunks for token in chunk.token_ids], device)
    shape = to_device(
        [
            [chunk.row for chunk in chunks],
            [chunk.start for chunk in chunks],
            [len(chunk.token_ids) for chunk in chunks],
            first_places(chunks),
        ],
        device,
    )
    rows, starts, lengths, firsts = shape
    chunk_of_token = torch.repeat_interleave(lengths, output_size=len(token_ids))
    places = torch.arange(len(token_ids), device=device)
    positions = places + (starts - firsts)[chunk_of_token]
    blocks = slots.granted_block_ids[rows[chunk_of_token], positions // block_size]
    return ForwardInputs(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        segments=_segments(chunks, slots.granted_block_ids.index_select(0, rows), starts),
    )


def _segments(
    chunks: Sequence[PrefillChunk],
    tables: torch.Tensor,  # [chunks, max_blocks] int64
    starts: torch.Tensor,  # [chunks] int64
) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    place = begin = 0
    for end in range(1, len(chunks) + 1):
        length = len(chunks[begin].token_ids)
        if end == len(chunks) or len(chunks[end].token_ids) != length:
            segments.append(Segment(place, end - begin, length, tables[begin:end], starts[begin:end]))
            place, begin = place + (end - begin) * length, end
    return tuple(segments)


def fill_draft_cache(
    model: CausalLM,
    pool: KVPool,
    slots: SlotTable,
    chunks: Sequence[PrefillChunk],
    inputs: ForwardInputs,
    states: torch.Tensor,  # [tokens, hidden], of `draft_hidden`
) -> None:
    """The MTP layer sees every prompt token: slot i gets the pair (h_{i-1}, t_i); slot 0 does not exist."""
    assert pool.block_hidden is not None, "drafts need block_hidden"
    firsts = first_places(chunks)
    lasts = [first + len(chunk.token_ids) - 1 for first, chunk in zip(firsts, chunks, strict=True)]
    rows, begin, end = to_device([[chunk.row for chunk in chunks], firsts, lasts], states.device)
    before = slots.chunk_hidden.index_select(0, rows)
    hits = {i: c.hidden_block_id for i, c in enumerate(chunks) if c.hidden_block_id is not None}
    if hits:
        places, block_ids = to_device([list(hits), list(hits.values())], states.device)
        before.index_copy_(0, places, pool.block_hidden.index_select(0, block_ids))
    previous = states.roll(1, 0).index_copy_(0, begin, before)
    slots.chunk_hidden.index_copy_(0, rows, states.index_select(0, end))
    pool.keep_hidden(inputs.slot_mapping, states)
    slot_mapping = torch.where(inputs.positions == 0, -1, inputs.slot_mapping)
    pairs = ForwardInputs(inputs.token_ids, inputs.positions, slot_mapping, inputs.segments)
    model.fill_draft_cache(pairs, previous, pool)
