"""Extends every query of a batch by the same number of tokens (PyTorch twin)."""

from __future__ import annotations

import torch


def extend_queries(
    query_start_loc: torch.Tensor,  # [R + 1] integer: index of each request's first token, then of the end
    seq_lens: torch.Tensor,  # [R] integer
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
    """Returns the first five arguments for queries and sequences that are n tokens longer, without slots.

    Two requests and n = 2:

        query_start_loc  0 4 5  ->  0 6 9       seq_lens  9 3  ->  11 5

    Semantics as in vLLM's `extend_all_queries_by_N`. In the engine all rows of a pass have one width, so that
    `prepare_verify_inputs` and `open_drafts` are called for the longer windows directly.
    """
    num_requests = len(seq_lens)
    places = torch.arange(num_requests + 1, device=query_start_loc.device, dtype=query_start_loc.dtype)
    starts = query_start_loc + n * places
    return starts, seq_lens + n, num_tokens + num_requests * n, max_query_len + n, max_seq_len + n
