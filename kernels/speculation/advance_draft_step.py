"""Advances an autoregressive drafter by one token per request."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.advance_draft_step import (
    advance_draft_step as advance_draft_step_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl
from headway.kernels.speculation._device_functions import slot_or_none

_ROWS = 128


@jit_once_for("max_model_len", "max_blocks", "table_stride", "num_requests", "input_batch_size")
def _advance_kernel(
    position_ptr: tl.tensor,
    table_ptr: tl.tensor,
    length_ptr: tl.tensor,
    new_position_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    max_model_len: tl.tensor,
    max_blocks: tl.tensor,
    table_stride: tl.tensor,
    num_requests: tl.tensor,
    input_batch_size: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per request of the graph."""
    request = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_request = request < num_requests
    position = tl.load(position_ptr + request, mask=is_request, other=0).to(tl.int64) + 1
    is_inside = is_request & (position < max_model_len)
    position = tl.where(is_inside, position, 0)
    column = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
    block = tl.load(table_ptr + request * table_stride + column, mask=is_inside, other=-1).to(tl.int64)
    tl.store(new_position_ptr + request, position, mask=is_request)
    slot = slot_or_none(is_inside, block, position, BLOCK_SIZE)
    tl.store(slot_ptr + request, slot, mask=request < input_batch_size)
    length = tl.load(length_ptr + request, mask=is_request, other=0).to(tl.int64)
    length = tl.where(is_inside, tl.minimum(length + 1, max_model_len), 1)
    tl.store(length_ptr + request, length, mask=is_request)


@falls_back_to(advance_draft_step_twin)
def advance_draft_step(
    positions: torch.Tensor,  # [R] integer: of the last tokens that the drafter has processed
    block_table: torch.Tensor,  # [R, max_blocks] integer
    seq_lens: torch.Tensor,  # [R] integer, in place
    block_size: int,
    max_model_len: int,
    out_positions: torch.Tensor,  # [>= R] integer, written; may be `positions`
    out_slot_mapping: torch.Tensor,  # [>= input_batch_size] integer, written
    input_batch_size: int | None = None,  # the graph's requests; None: R
) -> None:
    """Writes the next positions and their slots, block id * block_size + offset, and increments the lengths.

    A request whose new position is not below max_model_len gets position 0, slot -1 and length 1. Lengths are
    limited to max_model_len, and columns of the block table to its width. Slots from R to input_batch_size
    are -1; nothing else is written there. Semantics as in vLLM's
    `eagle_step_update_slot_mapping_and_metadata`; the twin explains what the engine does instead.
    """
    check_dense(positions, seq_lens, out_positions, out_slot_mapping)
    assert block_table.stride(1) == 1, "block ids of a row are adjacent"
    rows = len(positions)
    batch = rows if input_batch_size is None else input_batch_size
    assert rows <= batch <= len(out_slot_mapping), (rows, batch, len(out_slot_mapping))
    if batch > 0:
        _advance_kernel[(blocks_of(batch, _ROWS),)](
            positions, block_table, seq_lens, out_positions, out_slot_mapping, max_model_len,
            block_table.shape[1], block_table.stride(0), rows, batch, BLOCK_SIZE=block_size, ROWS=_ROWS,
        )  # fmt: skip
