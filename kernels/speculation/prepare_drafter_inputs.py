"""Finds the tokens at which a drafter samples in a padded batch, and the numbers of rejected tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.prepare_drafter_inputs import (
    prepare_drafter_inputs_padded as prepare_drafter_inputs_padded_twin,
)
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl

_ROWS = 128


@jit_once_for("num_existing", "num_requests")
def _prepare_inputs_kernel(
    drafts_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    start_ptr: tl.tensor,
    index_ptr: tl.tensor,
    rejected_ptr: tl.tensor,
    num_existing: tl.tensor,
    num_requests: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """One lane per request."""
    request = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_request = request < num_requests
    exists = is_request & (request < num_existing)
    before = tl.load(drafts_ptr + request - 1, mask=exists & (request > 0), other=0)
    num_drafts = tl.load(drafts_ptr + request, mask=exists, other=0) - before
    rejected = num_drafts + 1 - tl.load(valid_ptr + request, mask=exists, other=0)
    rejected = tl.where(num_drafts > 0, rejected, 0)
    end = tl.load(start_ptr + request + 1, mask=exists, other=0)
    tl.store(index_ptr + request, tl.where(exists, end - 1 - rejected, 0), mask=is_request)
    tl.store(rejected_ptr + request, rejected, mask=is_request)


@falls_back_to(prepare_drafter_inputs_padded_twin)
def prepare_drafter_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,  # [R] integer: drafts of each request and all before it
    valid_sampled_counts: torch.Tensor,  # [R] integer: tokens kept, one more than the accepted drafts
    query_start_loc: torch.Tensor,  # [R + 1] integer: index of each request's first token, then of the end
    num_requests: int | None = None,  # the requests that exist; None: all R
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token_indices_to_sample, num_rejected_tokens), [R] each, 0 for requests that do not exist.

    The rejected tokens stay in the batch, after the others of their request; the drafter samples at the token
    before them. Semantics as in vLLM's `eagle_prepare_inputs_padded_kernel`; the twin explains what the
    engine does instead.
    """
    check_dense(cu_num_draft_tokens, valid_sampled_counts, query_start_loc)
    rows = len(valid_sampled_counts)
    indices, rejected = query_start_loc.new_empty(rows), torch.empty_like(valid_sampled_counts)
    if rows > 0:
        _prepare_inputs_kernel[(blocks_of(rows, _ROWS),)](
            cu_num_draft_tokens, valid_sampled_counts, query_start_loc, indices, rejected,
            rows if num_requests is None else num_requests, rows, ROWS=_ROWS,
        )  # fmt: skip
    return indices, rejected
