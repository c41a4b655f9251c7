"""Gathers the inputs of the next forward pass: bonus tokens, their indices, and the accepted drafts."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.prepare import (
    prepare_next_forward_pass as prepare_next_forward_pass_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import count_accepted, token_or_none

_ROWS = 128


@jit
def _prepare_kernel(
    output_ptr: tl.tensor,
    place_ptr: tl.tensor,
    last_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    input_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    last_place_ptr: tl.tensor,
    accepted_ptr: tl.tensor,
    count_ptr: tl.tensor,
    num_decode: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per row, decode rows first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    is_decode = row < num_decode
    last = tl.load(last_ptr + row, mask=is_row, other=0)
    tl.store(sampled_ptr + row, tl.load(output_ptr + last, mask=is_row, other=0), mask=is_row)
    tl.store(last_place_ptr + row, tl.load(place_ptr + last, mask=is_row, other=0), mask=is_row)
    first = row * (DEPTH + 1)
    count = tl.zeros((ROWS,), tl.int64)
    for place in tl.static_range(DEPTH):
        is_accepted = tl.load(mask_ptr + first + place + 1, mask=is_decode, other=0) != 0
        draft = tl.load(input_ptr + first + place + 1, mask=is_decode, other=0)
        cell_ptr = accepted_ptr + row * row_stride + place * column_stride
        tl.store(cell_ptr, token_or_none(is_accepted, draft), mask=is_decode)
        count = count_accepted(count, is_accepted)
    tl.store(count_ptr + row, count, mask=is_decode)


@falls_back_to(prepare_next_forward_pass_twin)
def prepare_next_forward_pass(
    num_decode_requests: int,
    output_tokens: torch.Tensor,  # [total] or [1, total] integer
    required_logit_indices: torch.Tensor,  # [total] integer: index of each packed token
    last_one_indices: torch.Tensor,  # [rows] int64
    accepted_tokens_mask: torch.Tensor,  # [total] bool
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    sampled_tokens_buf: torch.Tensor,  # [>= rows] integer, written
    last_accepted_seq_buf: torch.Tensor,  # [>= rows] integer, written
    accepted_tokens_per_request: torch.Tensor,  # [>= decode rows, S] integer, written
    accepted_token_counts: torch.Tensor,  # [>= decode rows] integer, written
    num_speculative_tokens: int,
) -> None:
    """Fills the caller's buffers. Their entries beyond the rows, and the accepted tokens of prefill rows, are
    not changed."""
    check_dense(output_tokens, required_logit_indices, last_one_indices, accepted_tokens_mask)
    check_dense(input_tokens, sampled_tokens_buf, last_accepted_seq_buf, accepted_token_counts)
    rows = last_one_indices.numel()
    if rows > 0:
        _prepare_kernel[(blocks_of(rows, _ROWS),)](
            output_tokens, required_logit_indices, last_one_indices, accepted_tokens_mask, input_tokens,
            sampled_tokens_buf, last_accepted_seq_buf, accepted_tokens_per_request, accepted_token_counts,
            num_decode_requests, rows, *accepted_tokens_per_request.stride(),
            DEPTH=num_speculative_tokens, ROWS=_ROWS,
        )  # fmt: skip
