"""Selects each request's next input token from a padded batch of sampled tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.prepare_next_tokens import (
    prepare_next_tokens_padded as prepare_next_tokens_padded_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl
from headway.kernels.speculation._device_functions import count_accepted

_ROWS = 128


@jit_once_for("vocab_size", "num_requests", "row_stride", "place_stride")
def _next_tokens_kernel(
    sampled_ptr: tl.tensor,
    discard_ptr: tl.tensor,
    backup_ptr: tl.tensor,
    token_ptr: tl.tensor,
    count_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_requests: tl.tensor,
    row_stride: tl.tensor,
    place_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per request."""
    request = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_request = request < num_requests
    is_kept = is_request & (tl.load(discard_ptr + request, mask=is_request, other=1) == 0)
    token = tl.load(backup_ptr + request, mask=is_request, other=0).to(tl.int64)
    count = tl.zeros((ROWS,), tl.int64)
    for place in tl.static_range(WIDTH):
        sampled_at = sampled_ptr + request * row_stride + place * place_stride
        sampled = tl.load(sampled_at, mask=is_kept, other=-1).to(tl.int64)
        is_valid = (sampled != -1) & (sampled < vocab_size)
        token = tl.where(is_valid, sampled, token)
        count = count_accepted(count, is_valid)
    tl.store(token_ptr + request, token, mask=is_request)
    tl.store(count_ptr + request, count, mask=is_request)


@falls_back_to(prepare_next_tokens_padded_twin)
def prepare_next_tokens_padded(
    sampled_token_ids: torch.Tensor,  # [R, K + 1] integer, -1 where rejected
    discard_mask: torch.Tensor,  # [R] bool: requests whose tokens do not count
    backup_token_ids: torch.Tensor,  # [R] integer
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (next_token_ids, valid_counts), [R] each, both of the sampled tokens' dtype.

    Tokens other than -1 and below vocab_size are valid. The next token is the last valid one, or the backup
    token if there is none. A discarded request has no valid tokens. Semantics as in vLLM's
    `eagle_prepare_next_token_padded_kernel`; the twin explains what the engine does instead.
    """
    check_dense(discard_mask, backup_token_ids)
    rows, width = sampled_token_ids.shape
    tokens, counts = sampled_token_ids.new_empty((2, rows)).unbind()
    if rows > 0:
        _next_tokens_kernel[(blocks_of(rows, _ROWS),)](
            sampled_token_ids, discard_mask, backup_token_ids, tokens, counts, vocab_size, rows,
            *sampled_token_ids.stride(), WIDTH=width, ROWS=_ROWS,
        )  # fmt: skip
    return tokens, counts
