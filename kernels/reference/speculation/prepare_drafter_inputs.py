"""Finds the tokens at which a drafter samples in a padded batch, and the numbers of rejected tokens (PyTorch
twin)."""

from __future__ import annotations

import torch


def prepare_drafter_inputs_padded(
    cu_num_draft_tokens: torch.Tensor,  # [R] integer: drafts of each request and all before it
    valid_sampled_counts: torch.Tensor,  # [R] integer: tokens kept, one more than the accepted drafts
    query_start_loc: torch.Tensor,  # [R + 1] integer: index of each request's first token, then of the end
    num_requests: int | None = None,  # the requests that exist; None: all R
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (token_indices_to_sample, num_rejected_tokens), [R] each, 0 for requests that do not exist.

    The rejected tokens stay in the batch, after the others of their request; the drafter samples at the token
    before them. Three requests, the second without drafts:

        cu_num_draft_tokens  3 3 5      query_start_loc          0 4 5 8
        valid_sampled_counts 2 1 3      num_rejected_tokens      2 0 0
                                        token_indices_to_sample  1 4 7

    The results have the dtypes of query_start_loc and valid_sampled_counts. Semantics as in vLLM's
    `eagle_prepare_inputs_padded_kernel`. The engine needs neither result: `verify_and_rewind` removes
    rejected tokens from rows, and `open_drafts` computes the index of each row's last pair from the number of
    its pending pairs.
    """
    num_drafts = cu_num_draft_tokens.diff(prepend=cu_num_draft_tokens.new_zeros(1))
    rejected = torch.where(num_drafts > 0, num_drafts + 1 - valid_sampled_counts, 0)
    limit = len(rejected) if num_requests is None else num_requests
    exists = torch.arange(len(rejected), device=rejected.device) < limit
    rejected = (rejected * exists).to(valid_sampled_counts.dtype)
    indices = torch.where(exists, query_start_loc[1:] - 1 - rejected, 0)
    return indices.to(query_start_loc.dtype), rejected
