"""Extends every query of a batch by the same number of tokens."""

from __future__ import annotations

import torch

from headway.kernels.reference.speculation.extend_queries import extend_queries as extend_queries_twin
from headway.kernels.runtime._triton import blocks_of, check_dense, falls_back_to, jit_once_for, tl

_ROWS = 128


@jit_once_for("n", "num_requests")
def _extend_kernel(
    start_ptr: tl.tensor,
    length_ptr: tl.tensor,
    new_start_ptr: tl.tensor,
    new_length_ptr: tl.tensor,
    n: tl.tensor,
    num_requests: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """One lane per request, and one for the end of the last request."""
    request = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    has_start, is_request = request <= num_requests, request < num_requests
    start = tl.load(start_ptr + request, mask=has_start, other=0)
    tl.store(new_start_ptr + request, start + n * request, mask=has_start)
    length = tl.load(length_ptr + request, mask=is_request, other=0)
    tl.store(new_length_ptr + request, length + n, mask=is_request)


@falls_back_to(extend_queries_twin)
def extend_queries(
    query_start_loc: torch.Tensor,  # [R + 1] integer: index of each request's first token, then of the end
    seq_lens: torch.Tensor,  # [R] integer
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """Returns the first five arguments for queries and sequences that are n tokens longer, without slots.
    Semantics as in vLLM's `extend_all_queries_by_N`; the twin explains what the engine does instead."""
    check_dense(query_start_loc, seq_lens)
    rows = len(seq_lens)
    starts, lengths = torch.empty_like(query_start_loc), torch.empty_like(seq_lens)
    _extend_kernel[(blocks_of(rows + 1, _ROWS),)](
        query_start_loc, seq_lens, starts, lengths, n, rows, ROWS=_ROWS
    )
    return starts, lengths, num_tokens + rows * n, max_query_len + n, max_seq_len + n
