"""Verifies the drafts of a packed batch against the target's tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.verify import (
    verify_speculative_tokens as verify_speculative_tokens_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit, tl
from headway.kernels.speculation._device_functions import accepts_draft, count_accepted

_ROWS = 128


@jit
def _verify_kernel(
    input_ptr: tl.tensor,
    output_ptr: tl.tensor,
    last_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    num_decode: tl.tensor,
    num_rows: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One lane per row, decode rows first."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    is_decode = row < num_decode
    # Row r begins at r * (DEPTH + 1), minus DEPTH for each prefill row before it, which has no drafts.
    first = row * (DEPTH + 1) - tl.maximum(row - num_decode, 0) * DEPTH
    tl.store(mask_ptr + first, is_row, mask=is_row)
    is_accepted = is_decode
    accepted = tl.zeros((ROWS,), tl.int64)
    for place in tl.static_range(DEPTH):
        draft = tl.load(input_ptr + first + place + 1, mask=is_decode, other=0)
        target = tl.load(output_ptr + first + place, mask=is_decode, other=0)
        is_accepted = accepts_draft(is_accepted, draft, target)
        tl.store(mask_ptr + first + place + 1, is_accepted, mask=is_decode)
        accepted = count_accepted(accepted, is_accepted)
    tl.store(last_ptr + row, first + accepted, mask=is_row)


@falls_back_to(verify_speculative_tokens_twin)
def verify_speculative_tokens(
    input_tokens: torch.Tensor,  # [total] or [1, total] integer
    output_tokens: torch.Tensor,  # [total] or [1, total] integer: what the target chose after each input
    num_decode_requests: int,
    num_prefill_requests: int,
    num_speculative_tokens: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (last_one_indices [rows] int64, accepted_tokens_mask [total] bool, input_tokens [total]).
    last_one_indices: the index of each row's last accepted token. The twin shows an example."""
    check_dense(input_tokens, output_tokens)
    tokens, rows = input_tokens.view(-1), num_decode_requests + num_prefill_requests
    if out is None:
        last = torch.empty(rows, dtype=torch.int64, device=tokens.device)
        out = last, torch.empty(tokens.shape, dtype=torch.bool, device=tokens.device)
    total = num_decode_requests * (num_speculative_tokens + 1) + num_prefill_requests
    if tokens.numel() > total:
        out[1][total:].fill_(False)
    if rows > 0:
        _verify_kernel[(blocks_of(rows, _ROWS),)](
            tokens, output_tokens, *out, num_decode_requests, rows, DEPTH=num_speculative_tokens, ROWS=_ROWS
        )
    return *out, tokens
