"""Marks prefilled rows as decoding, in one launch."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.begin_decode import begin_decode as begin_decode_twin
from headway.kernels.runtime._triton import check_dense, falls_back_to, jit_once_for, tl
from headway.kernels.types._row_state import RowState

_BLOCKS, _WARPS = 1024, 4


@jit_once_for(
    "max_blocks", "table_stride", "granted_stride", "pending_stride", "index_ptr", "token_ptr", "new_length_ptr"
)  # fmt: skip
def _start_kernel(
    index_ptr: tl.tensor,
    token_ptr: tl.tensor,
    new_length_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    length_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    count_ptr: tl.tensor,
    last_id_ptr: tl.tensor,
    pending_count_ptr: tl.tensor,
    table_ptr: tl.tensor,
    granted_ptr: tl.tensor,
    pending_ptr: tl.tensor,
    max_blocks: tl.tensor,
    table_stride: tl.tensor,
    granted_stride: tl.tensor,
    pending_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Each program computes a row."""
    row = tl.load(index_ptr + tl.program_id(0))
    token = tl.load(token_ptr + tl.program_id(0))
    length = tl.load(new_length_ptr + tl.program_id(0))
    count = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    tl.store(last_token_ptr + row, token)
    tl.store(pending_ptr + row * pending_stride, token)
    tl.store(pending_count_ptr + row, 1)
    tl.store(length_ptr + row, length)
    tl.store(offset_ptr + row, (length - 1) % BLOCK_SIZE)
    tl.store(count_ptr + row, count)
    tl.store(last_id_ptr + row, tl.load(granted_ptr + row * granted_stride + count - 1))
    for first in range(0, max_blocks, BLOCKS):
        place = first + tl.arange(0, BLOCKS)
        block = tl.load(granted_ptr + row * granted_stride + place, mask=place < count, other=-1)
        tl.store(table_ptr + row * table_stride + place, block, mask=place < max_blocks)


@falls_back_to(begin_decode_twin)
def begin_decode(
    rows: RowState,  # in place: all but limits, depth_caps, grants and prefill_status
    index: torch.Tensor,  # [n] int64: rows, each once
    tokens: torch.Tensor,  # [n] int64: the tokens after their prompts, the first that are not in the cache
    lengths: torch.Tensor,  # [n] int64: of the prompts, 1 or more, in granted blocks
    block_size_tokens: int,
) -> None:
    """Makes these rows take part in rounds from the next round on."""
    numbers = rows.last_tokens, rows.kv_lengths
    places = rows.last_block_offsets, rows.block_counts, rows.last_block_ids, rows.pending_counts
    check_dense(index, tokens, lengths, *numbers, *places)
    tables = rows.kv_block_ids, rows.granted_block_ids, rows.pending_tokens
    assert all(table.stride(1) == 1 for table in tables), "the entries of a row are adjacent"
    if len(index) > 0:
        _start_kernel[(len(index),)](
            index, tokens, lengths, *numbers, *places, *tables, tables[0].shape[1],
            *(table.stride(0) for table in tables), BLOCK_SIZE=block_size_tokens, BLOCKS=_BLOCKS, num_warps=_WARPS,
        )  # fmt: skip
